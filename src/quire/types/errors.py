"""All errors that Quire raises on purpose.

```
QuireError
├── RequestError(ValueError)        the client's request is wrong; other requests continue        (HTTP 400)
│   ├── InvalidParameter            one parameter has a bad value; `.parameter` names it
│   │   └── UnknownParameter        (TypeError) there is none of that name
│   ├── AdapterError                a LoRA adapter's files are missing, broken, or do not fit the model
│   │   └── AdapterChanged          they have changed since the adapter was loaded
│   ├── FetchFailed                 an image or a video cannot be fetched                         (HTTP 422)
│   ├── PromptTooLong               the prompt cannot fit the context or the cache
│   └── NotSupported                known, but not supported          (HTTP 400 if it names a field, else 501)
├── ConfigError(ValueError)         the settings of the engine are invalid
│   └── PlugInError                 code of another package fails
├── ModelError(RuntimeError)        the checkpoint is missing, broken, or of an unknown kind
│   └── ModelNotFound               nothing on disk, in the cache or on the hub has that name
└── EngineError(RuntimeError)       the engine itself failed                                      (HTTP 500)
    └── EngineDead                  and cannot go on
        └── ExpertPeerLost      since another engine ended, which has some of its experts
```

The message states the problem and the solution.
"""

# why a request ended when it forbade all tokens at once
NO_TOKEN = (
    "no token is allowed: structured_outputs, allowed_token_ids, bad_words, logit_bias and min_tokens, which delays stop "
    "tokens, forbid all of them together"
)


class QuireError(Exception):
    pass


class RequestError(QuireError, ValueError):
    """`parameter` is the wrong request field, as the client spelled it, or None."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class InvalidParameter(RequestError):
    pass


class UnknownParameter(InvalidParameter, TypeError):
    pass


class AdapterError(RequestError):
    pass


class AdapterChanged(AdapterError):
    pass


class FetchFailed(RequestError):
    pass


class PromptTooLong(RequestError):
    pass


class NotSupported(RequestError):
    pass


class ConfigError(QuireError, ValueError):
    pass


class PlugInError(ConfigError):
    pass


PLUGIN_FAILURES = (Exception, SystemExit)  # of code of plug-ins and users, whose sys.exit must not end the process


class ModelError(QuireError, RuntimeError):
    pass


class ModelNotFound(ModelError):
    pass


class EngineError(QuireError, RuntimeError):
    pass


class EngineDead(EngineError):
    pass


class ExpertPeerLost(EngineDead):
    pass
