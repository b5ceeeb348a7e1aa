"""JSON schemas of growing difficulty, made by rule: the i-th of n is the same every time."""

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]+$", "^(red|green|blue)-[0-9]{2}$", r"^\d{4}-\d{2}$", r"^#[0-9a-f]{6}$", "^[^x]{1,5}$")
FORMATS = ("date", "time", "uuid", "ipv4", "email")
WORDS = ("name", "age", "tags", "size", "city", "zip-code", "kind", "état", "a b", "notes", "score", "parent")


class Maker:
    def __init__(self, seed: int, depth: int) -> None:
        self._random = random.Random(seed)
        self._depth = depth
        self._names: list[str] = []  # of definitions that may be referred to

    def make(self) -> Schema:
        definitions = {}
        for i in range(self._random.randrange(self._depth)):
            definitions[f"part{i}"] = self.value(1)
            self._names.append(f"part{i}")
        schema = self.object(self._depth)
        if self._depth > 2:
            schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
            definitions["tree"] = {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -9, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        return schema | ({"$defs": definitions} if definitions else {})

    def value(self, depth: int) -> Schema:
        simple = [self.string, self.number, self.choice, lambda: {"type": "boolean"}, lambda: {"type": ["null", "integer"]}]
        nested = [self.object, self.array, self.union]
        if self._names and self._random.random() < 0.2:
            return {"$ref": f"#/$defs/{self._random.choice(self._names)}"}
        if depth <= 0 or self._random.random() < 0.4:
            return self._random.choice(simple)()
        return self._random.choice(nested)(depth - 1)

    def string(self) -> Schema:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        return {"type": "string", "minLength": self._random.randrange(3), "maxLength": self._random.randrange(3, 12)}

    def number(self) -> Schema:
        low = self._random.randrange(-500, 500)
        bounds = {"minimum": low, "maximum": low + self._random.randrange(1, 2000)}
        if self._random.random() < 0.3:
            bounds = {"exclusiveMinimum": low / 8, "exclusiveMaximum": low / 8 + 2.5}
            return {"type": "number", **bounds}
        if self._random.random() < 0.2:
            return {"type": "integer", "multipleOf": self._random.choice((2, 5, 7)), "minimum": 0, "maximum": 1000}
        return {"type": self._random.choice(("integer", "number")), **bounds}

    def choice(self) -> Schema:
        if self._random.random() < 0.3:
            return {"const": self._random.choice(["fixed", 7, None, True, ["a", 1]])}
        return {"enum": self._random.sample(["a", "b\n", 'quo"te', "ü", 1, 2.5, None, False, {"k": 1}, [1, 2]], 4)}

    def array(self, depth: int) -> Schema:
        least = self._random.randrange(3)
        if self._random.random() < 0.25:
            return {"type": "array", "prefixItems": [self.value(0), self.value(0)], "items": False, "minItems": 2}
        return {"type": "array", "items": self.value(depth), "minItems": least, "maxItems": least + self._random.randrange(3)}

    def union(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"anyOf": [self.value(depth), self.value(depth)]}
        tagged = [self.object(depth) for _ in range(2)]
        for i, schema in enumerate(tagged):
            schema["properties"] = {"type": {"const": f"kind{i}"}, **schema["properties"]}
            schema["required"] = ["type", *schema["required"]]
        return {"oneOf": tagged}

    def object(self, depth: int) -> Schema:
        names = self._random.sample(WORDS, self._random.randrange(1, 3 + depth))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": [name for name in names if self._random.random() < 0.7],
            "additionalProperties": False,
        }
        if depth > 1 and self._random.random() < 0.2:
            schema["additionalProperties"] = {"type": "boolean"}
        return schema


def make_schemas(count: int) -> list[Schema]:
    """From flat objects to trees five deep."""
    return [Maker(seed, 1 + 5 * seed // count).make() for seed in range(count)]
