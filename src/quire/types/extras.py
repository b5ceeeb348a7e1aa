"""What a request brings along beside tokens and sampling parameters, from where its prompt is read to the rows of the device.

Prompt ─► EngineRequest ─► Admission ─► the runner's row parts           a field here travels by itself
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Extras:
    adapter: int = 0  # the number of the adapter that its tokens run with; 0 = none
    pool: bool = False  # the hidden state of the prompt's last token is wanted: the delta with the first token has it

    @property
    def salt(self) -> tuple[str, ...]:
        """What of it cached keys and values depend on."""
        return (f"adapter={self.adapter}",) if self.adapter else ()


NO_EXTRAS = Extras()
