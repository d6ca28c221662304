"""JSON Schemas in the words that a grammar can enforce.

A grammar knows `allOf` and `anyOf`, types, bounds, patterns, properties and items. Most other keywords can be said in
those words, and the compiler of the grammar does the rest: it intersects, and drops branches that allow no value.

    not                        pushed inwards until it stands before a keyword whose opposite can be said: not
                               `minimum: 3` is `exclusiveMaximum: 3`, not a constant is a pattern of all other texts
    if, then, else             (if and then) or (not if and else)
    oneOf                      anyOf where the branches exclude each other, else each one and none of the others
    dependentRequired, …       the property is absent, or the rest follows
    contains                   one of the first items matches
    uniqueItems                the arrays without repetition, spelled out, if there are few values
    propertyNames              a pattern of names, and no others
    unevaluatedProperties, …   additionalProperties, where no other schema looks into the same value

What is written always matches the original schema. It may allow less: a set of more than five values comes in the order
of its schema, and an object may not use free names where `minProperties` can be met by those that are listed. A keyword
that cannot be said so is left out and named: `not_enforced`. Definitions move to `$defs`, under their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations, product
from math import comb, perm
from typing import Any, Never
from urllib.parse import unquote, urldefrag, urljoin

from msgspec import Struct

from modelyard.core.limits import MAX_PATTERN

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
# Sizes of numbers and hints for editors: they restrict no value.
_HINTS = frozenset({"int32", "int64", "float", "double", "password", "binary", "path", "file-path", "directory-path"})
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NEGATED_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
# Lookaround, back-references, word boundaries and possessive repetition are not regular.
_UNREGULAR = re.compile(r"\(\?(?!s?:)|\\[1-9bBAZzGkKpPQE]|[*+?}]\+")
# Where ^ and $ are not anchors, or are at either end; elsewhere they are not supported.
# A class that is not closed reaches to the end: searching for its end again and again would take quadratic time.
_UNANCHORED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\Z)|\A\^|\$\Z", re.DOTALL)
# Set operations in a class: languages read them differently.
_SET_OPERATION = re.compile(r"\A\[\^?\[|--|&&|~~|\|\|")
# `re.compile` takes 10 ms for a class with characters beyond these 256. Which ones they are makes no pattern invalid.
_FAR_CHARACTER = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\0-\xff]")
_SYNTAX = re.compile(r"[\\\[\]^$.|?*+(){}&~#-]")
_PREFIX = re.compile(r"\^([\w-]+)(?![\w*?{-])")
_ROOT = "http://schema.invalid/"  # the base of relative references in a schema without an address
_MAX_DEPTH = 64
_MAX_NODES = 6000  # schemas that are written for keywords with other words
_MAX_ORDERS, _MAX_SETS, _MAX_CHOICES = 400, 256, 64
_MAX_RANGE = 16
_POSITIONS = 6  # the first items, one of which may be what an array contains
_MAX_TEXTS = 1000  # characters of constants that a text must not be


class Rewritten(Struct):
    """`loop`: a reference that leads back to itself, so that no value matches."""

    schema: dict[str, Any]
    not_enforced: list[str]
    loop: str | None = None


class _CannotSay(Exception):
    """There are no other words for a keyword."""


def rewritten(schema: Mapping[str, Any]) -> Rewritten:
    rewriter = _Rewriter(schema)
    made = rewriter.written()
    return Rewritten(made, list(dict.fromkeys(rewriter.not_enforced)), rewriter.loop)


class _Rewriter:
    """Writes one schema. `_lower` walks the original; `_says` gives, for a keyword, a schema in simpler words of the
    original language, which is lowered in its turn. So no part of the original is ever read under a negation."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.not_enforced: list[str] = []
        self.loop: str | None = None
        self._root, self._references = root, _References(root)
        self._names: dict[int, str] = {}  # of referenced schemas, by identity
        self._waiting: list[tuple[str, Any, str, str]] = []
        self._made = 0
        dependent = dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), self._dependent)
        self._says: dict[str, Callable[[Mapping[str, Any], str, str], Any]] = {
            **dependent,
            **dict.fromkeys(_CLOSED, self._unevaluated),
            "not": self._not,
            "if": self._if,
            "oneOf": self._one_of,
            "contains": self._contains,
            "uniqueItems": self._unique_items,
            "propertyNames": self._property_names,
            "minProperties": self._min_properties,
            "maxProperties": self._max_properties,
        }

    def written(self) -> dict[str, Any]:
        root = self._lower(self._root, _ROOT, "", 0)
        root = root if isinstance(root, dict) else {} if root else {"allOf": [False]}
        definitions: dict[str, Any] = {}
        for name, schema, base, _ in self._waiting:  # grows meanwhile
            definitions[name] = self._lower(schema, base, f"/$defs/{name}", 0)
        for name in _endless({"#": root} | {f"#/$defs/{name}": each for name, each in definitions.items()}):
            refs = [ref for key, _, _, ref in self._waiting if f"#/$defs/{key}" == name]
            self.loop = refs[0] if refs else "#"
            self.not_enforced.append(f"/$ref {self.loop}")
            if name == "#":
                return {}
            definitions[name.rpartition("/")[2]] = {}
        return root | ({"$defs": definitions} if definitions else {})

    def _lower(self, schema: Any, base: str, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if depth > _MAX_DEPTH or self._made > _MAX_NODES:
            self.not_enforced.append(path)
            return {}
        schema, malformed = _well_formed(schema)
        self.not_enforced += [f"{path}/{word}" for word in malformed]
        if "$id" in schema:
            base = urljoin(base, schema["$id"])
        out: dict[str, Any] = {}
        both: list[Any] = []
        for word, value in schema.items():
            at = f"{path}/{word}"
            try:
                if word in _LISTS_OF_SCHEMAS and word != "oneOf":
                    out[word] = [self._lower(one, base, f"{at}/{n}", depth + 1) for n, one in enumerate(value)]
                elif word in ("properties", "patternProperties"):
                    out[word] = {key: self._lower(one, base, f"{at}/{key}", depth + 1) for key, one in value.items()}
                    _require_disjoint(out, word)
                elif word in ("items", "additionalProperties"):
                    out[word] = self._lower(value, base, at, depth + 1)
                elif word in _REFERENCES:
                    target, where = self._references.target(word, value, base)
                    if isinstance(target, bool):
                        both.append(target)
                    else:
                        out["$ref"] = self._reference(value, target, where)
                elif word in self._says:
                    if (said := self._says[word](schema, base, word)) is not True:
                        wider = {"anyOf": value} if word == "oneOf" and said["anyOf"] is not value else None
                        both.append(self._lower_words(said, base, at, depth, wider))
                elif word in _KEPT:
                    out[word] = value
            except _CannotSay:
                out.pop(word, None)
                self.not_enforced.append(at)
        if schema.get("nullable") is True and isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
        return _joined(out, both)

    def _lower_words(self, schema: Any, base: str, path: str, depth: int, wider: Any = None) -> Any:
        """Of a keyword with other words. `wider` is what remains of it if those cannot be said."""
        before = len(self.not_enforced)
        self._made += 1 + (len(schema.get("anyOf", ())) if isinstance(schema, dict) else 0)
        lowered = self._lower(schema, base, path, depth + 1)
        if wider is not None and len(self.not_enforced) > before:
            self.not_enforced[before:] = [path]
            lowered = self._lower(wider, base, path, depth + 1)
        # The words are ours: name the client's keyword, and what could not be said in it.
        named = [each if each == path else f"{path}/{each.rpartition('/')[2]}" for each in self.not_enforced[before:]]
        self.not_enforced[before:] = named
        return lowered

    def _reference(self, ref: str, target: Mapping[str, Any], base: str) -> str:
        """The definition of this name is written later, once."""
        if target is self._root:
            return "#"
        if id(target) not in self._names:
            step = ref.rpartition("/")[2]
            name = step if re.fullmatch(r"\w+", step) else "ref"
            name = name if name not in self._names.values() else f"{name}_{len(self._names)}"
            self._names[id(target)] = name
            self._waiting.append((name, target, base, ref))
        return f"#/$defs/{self._names[id(target)]}"

    def _resolved(self, schema: Any, base: str) -> tuple[Mapping[str, Any], str]:
        """Through references, as far as there is nothing beside them."""
        for _ in range(_MAX_DEPTH):
            if isinstance(schema, bool):
                return ({} if schema else {"type": []}), base
            schema, malformed = _well_formed(schema)
            if malformed:
                _cannot()
            if "$id" in schema:
                base = urljoin(base, schema["$id"])
            word = next((word for word in _REFERENCES if word in schema), None)
            if word is None or set(schema) & _ASSERTIONS - {word}:
                return schema, base
            schema, base = self._references.target(word, schema[word], base)
        return _cannot()

    # --- other words for a keyword ------------------------------------------------------------------------------------

    def _not(self, schema: Mapping[str, Any], base: str, _word: str) -> Any:
        return _any_of(self._opposites(schema["not"], base))

    def _if(self, schema: Mapping[str, Any], _base: str, _word: str) -> Any:
        if "then" not in schema and "else" not in schema:
            return True
        condition = schema["if"]
        met, unmet = {"allOf": [condition, schema.get("then", True)]}, {"not": condition}
        return {"anyOf": [met, {"allOf": [unmet, schema.get("else", True)]}]}

    def _one_of(self, schema: Mapping[str, Any], base: str, _word: str) -> Any:
        branches = schema["oneOf"]
        if all(self._are_disjoint(a, b, base) for a, b in combinations(branches, 2)):
            return {"anyOf": branches}
        others = [[{"not": each} for each in (*branches[:n], *branches[n + 1 :])] for n in range(len(branches))]
        return {"anyOf": [{"allOf": [one, *rest]} for one, rest in zip(branches, others, strict=True)]}

    def _dependent(self, schema: Mapping[str, Any], _base: str, word: str) -> Any:
        rules = []
        for name, needed in schema[word].items():
            then = [{"required": needed}] if isinstance(needed, list) else [needed]
            rules.append({"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, *then]}]})
        return {"allOf": rules} if rules else True

    def _contains(self, schema: Mapping[str, Any], _base: str, _word: str) -> Any:
        least, most, wanted = schema.get("minContains", 1), schema.get("maxContains"), schema["contains"]
        if least == 0 and most is None:
            return True
        if most is not None and most < least:
            return _OTHER_THAN["array"]
        if least > _POSITIONS:
            _cannot()
        other: Any = True if most is None else {"not": wanted}
        arrays = []
        for marks in product((0, 1), repeat=min(_POSITIONS, schema.get("maxItems", _POSITIONS))):
            last = max((n + 1 for n, mark in enumerate(marks) if mark), default=0)
            if any(marks[last:]) or not (sum(marks) == least if most is None else least <= sum(marks) <= most):
                continue
            prefix = [wanted if mark else other for mark in marks[:last]]
            leading = {"prefixItems": prefix, "minItems": last} if prefix else {}
            arrays.append({"type": "array", **leading} | ({} if other is True else {"items": other}))
        return _any_of([_OTHER_THAN["array"], *_distinct(arrays)])

    def _unique_items(self, schema: Mapping[str, Any], base: str, _word: str) -> Any:
        low, high, leading = schema.get("minItems", 0), schema.get("maxItems"), schema.get("prefixItems", ())
        if schema["uniqueItems"] is False or (high is not None and high <= 1):
            return True
        is_full = leading and (schema.get("items") is False or high == len(leading))
        if is_full and all(self._are_disjoint(a, b, base) for a, b in combinations(leading, 2)):
            return True
        if leading or "items" not in schema:
            _cannot()
        values = _distinct(self._values(schema["items"], base))
        sizes = range(low, min(len(values), len(values) if high is None else high) + 1)
        if sum(perm(len(values), size) for size in sizes) <= _MAX_ORDERS:
            lists = [each for size in sizes for each in permutations(values, size)]
        elif sum(comb(len(values), size) for size in sizes) <= _MAX_SETS:
            lists = [each for size in sizes for each in combinations(values, size)]
        else:
            _cannot()
        return _any_of([_OTHER_THAN["array"], *map(_exactly, map(list, lists))])

    def _property_names(self, schema: Mapping[str, Any], base: str, _word: str) -> Any:
        if schema["propertyNames"] is True:
            return True
        if "patternProperties" in schema:
            _cannot()
        pattern = self._name_pattern(schema["propertyNames"], base)
        return {"patternProperties": {} if pattern is None else {pattern: True}, "additionalProperties": False}

    def _name_pattern(self, names: Any, base: str) -> str | None:
        """None: there is no such name."""
        names, base = self._resolved(names, base)
        if "string" not in _as_list(names.get("type", "string")):
            return None
        said = set(names) & _ASSERTIONS - {"type"}
        if said == {"pattern"} and _is_regular(names["pattern"]):
            return str(names["pattern"])
        if said <= {"minLength", "maxLength"}:
            return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
        if said == {"not"}:
            forbidden = [text for text in self._values(names["not"], base) if isinstance(text, str)]
            return f"^{_other_texts(forbidden)}$"
        if len(said) > 1:
            _cannot()
        texts = [text for text in self._values(names, base) if isinstance(text, str)]
        return f"^(?:{'|'.join(map(_escape, texts))})$" if texts else None

    def _min_properties(self, schema: Mapping[str, Any], _base: str, _word: str) -> Any:
        """A grammar cannot see that a free name comes twice, so the names that are listed must suffice, but for one."""
        required, optional = _names_of(schema)
        missing = schema["minProperties"] - len(required)
        if missing <= 0:
            return True
        if not optional and missing == 1:
            named = dict.fromkeys(required, True)
            return {"minProperties!": schema["minProperties"], "properties": named, "required": required}
        if not 0 < comb(len(optional), missing) <= _MAX_CHOICES:
            _cannot()
        chosen = [{"required": list(names)} for names in combinations(optional, missing)]
        return _any_of([_OTHER_THAN["object"], *chosen])

    def _max_properties(self, schema: Mapping[str, Any], _base: str, _word: str) -> Any:
        required, optional = _names_of(schema)
        room = schema["maxProperties"] - len(required)
        if room < 0:
            return _OTHER_THAN["object"]
        if not optional:
            named = dict.fromkeys(required, True)
            return {"maxProperties!": schema["maxProperties"], "properties": named, "required": required}
        if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
            _cannot()
        if room >= len(optional):
            return True
        if comb(len(optional), room) > _MAX_CHOICES:
            _cannot()
        kept = combinations(optional, room)
        return _any_of([{"properties": dict.fromkeys(sorted({*optional} - {*names}), False)} for names in kept])

    def _unevaluated(self, schema: Mapping[str, Any], _base: str, word: str) -> Any:
        """Where nothing else looks into the same value, it is what is additional."""
        closed, listed = _CLOSED[word]
        if schema[word] is True or closed in schema:
            return True
        if set(schema) & _IN_PLACE:
            _cannot()
        known = {each: schema[each] for each in listed if each in schema}
        free = {each: dict.fromkeys(v, True) if isinstance(v, dict) else [True] * len(v) for each, v in known.items()}
        return free | {closed: schema[word]}

    # --- opposites ----------------------------------------------------------------------------------------------------

    def _opposites(self, schema: Any, base: str) -> list[Any]:
        """Schemas, one of which matches if and only if this one does not."""
        if isinstance(schema, bool):
            return [] if schema else [True]
        schema, malformed = _well_formed(schema)
        if malformed:
            _cannot()
        return [each for word in schema if word in _ASSERTIONS for each in self._opposite(word, schema, base)]

    def _opposite(self, word: str, schema: Mapping[str, Any], base: str) -> list[Any]:
        value = schema[word]
        if word in _NEGATED_BOUNDS:
            type_, bound, change = _NEGATED_BOUNDS[word]
            return [{"type": type_, bound: value + change}] if change >= 0 or value > 0 else []
        if word in _REFERENCES:
            target, where = self._references.target(word, value, base)
            return [{"$id": where, "not": target}]
        match word:
            case "not":
                return [value]
            case "type":
                return [_other_types(_as_list(value))]
            case "const" | "enum":
                return [_other_values(value if word == "enum" else [value])]
            case "allOf":
                return [{"not": each} for each in value]
            case "anyOf":
                return [{"allOf": [{"not": each} for each in value]}]
            case "oneOf" if all(self._are_disjoint(a, b, base) for a, b in combinations(value, 2)):
                return [{"allOf": [{"not": each} for each in value]}]
            case "if":
                met, unmet = schema.get("then", True), schema.get("else", True)
                opposites = [[value, {"not": met}]] * (met is not True)
                return [
                    {"allOf": each}
                    for each in [*opposites, *([[{"not": value}, {"not": unmet}]] * (unmet is not True))]
                ]
            case "then" | "else" | "minContains" | "maxContains" if word[0] in "te" or "contains" not in schema:
                return []
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                part = {name: {"not": each} for name, each in value.items() if each is not True}
                return [{"type": "object", "required": [name], "properties": {name: part[name]}} for name in part]
            case "prefixItems":
                before: list[Any] = [True]
                opposites = [[*(before * n), {"not": each}] for n, each in enumerate(value) if each is not True]
                return [{"type": "array", "prefixItems": each, "minItems": len(each)} for each in opposites]
            case "items" if value is False:
                return [{"type": "array", "minItems": len(schema.get("prefixItems", ())) + 1}]
            case "items" if "prefixItems" not in schema:
                return [{"type": "array", "contains": {"not": value}}]
            case "contains" if not {"minContains", "maxContains"} & set(schema):
                return [{"type": "array", "items": {"not": value}}]
            case "additionalProperties" | "unevaluatedProperties" | "unevaluatedItems" | "propertyNames" if (
                value is True
            ):
                return []
            case "uniqueItems" if value is False:
                return []
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return [{"not": self._dependent(schema, base, word)}] if value else []
        return _cannot()

    # --- which values a schema allows ---------------------------------------------------------------------------------

    def _values(self, schema: Any, base: str) -> list[Any]:
        """All values that may match, if they are few."""
        schema, base = self._resolved(schema, base)
        if "const" in schema:
            return [schema["const"]]
        if "enum" in schema:
            return list(schema["enum"])
        if "anyOf" in schema:
            return [value for each in schema["anyOf"] for value in self._values(each, base)]
        types: list[Any] = []
        for each in _as_list(schema.get("type", "any")):
            if each == "integer" and {"minimum", "maximum"} <= set(schema):
                low, high = schema["minimum"], schema["maximum"]
                if high - low > _MAX_RANGE:
                    _cannot()
                types += range(int(-(-low // 1)), int(high // 1) + 1)
            elif each in ("boolean", "null"):
                types += [False, True] if each == "boolean" else [None]
            else:
                _cannot()
        return types

    def _are_disjoint(self, one: Any, other: Any, base: str) -> bool:
        """Whether it is plain that no value matches both: by type, or by a property that both require."""
        try:
            (a, a_base), (b, b_base) = self._resolved(one, base), self._resolved(other, base)
        except _CannotSay:
            return False
        if not (common := _types_of(a) & _types_of(b)):
            return True
        mine, theirs = (each.get("enum", [each["const"]] if "const" in each else []) for each in (a, b))
        if mine and theirs:
            return not set(map(_key, mine)) & set(map(_key, theirs))
        names = set(a.get("required", ())) & set(b.get("required", ())) if common == {"object"} else ()
        parts = [(a.get("properties", {}).get(name, True), b.get("properties", {}).get(name, True)) for name in names]
        return a_base == b_base and any(self._are_disjoint(*pair, a_base) for pair in parts)


class _References:
    """Finds what a reference means: a path, an anchor or the address of a part of the same document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._resources: dict[str, Any] | None = None  # by address, and by address with an anchor
        self._dynamic: list[str] = []

    def target(self, word: str, ref: Any, base: str) -> tuple[Any, str]:
        if not isinstance(ref, str):
            _cannot()
        address, fragment = (base, ref[1:]) if ref.startswith("#") else urldefrag(urljoin(base, ref))
        if self._resources is None:
            self._resources = {_ROOT: self._root}
            self._index(self._root, _ROOT, 0)
        if word != "$ref" and self._dynamic.count(fragment) > 1:
            _cannot()  # it depends on how the reference was reached
        if fragment and not fragment.startswith("/"):
            found = self._resources.get(f"{address}#{fragment}", _MISSING)
        else:
            found, address = self._at(self._resources.get(address, _MISSING), fragment, address)
        if not isinstance(found, bool | Mapping):
            _cannot()
        return found, address

    def _index(self, schema: Any, base: str, depth: int) -> None:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._resources is None:
            return
        if isinstance(id_ := schema.get("$id"), str):
            address, fragment = urldefrag(urljoin(base, id_))
            if fragment:  # an anchor in draft 7
                self._resources.setdefault(f"{base}#{fragment}", schema)
            else:
                base = address
                self._resources.setdefault(base, schema)
        for word in ("$anchor", "$dynamicAnchor", "$recursiveAnchor"):
            if word in schema:
                name = schema[word] if isinstance(schema[word], str) else ""
                self._dynamic += [name] * (word != "$anchor")
                self._resources.setdefault(f"{base}#{name}", schema)
        for word, value in schema.items():
            parts: Any = ()
            if word in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                parts = value.values()
            elif isinstance(value, list) and (word in _LISTS_OF_SCHEMAS or word == "items"):
                parts = value
            elif word in _SCHEMAS:
                parts = [value]
            for part in parts:
                self._index(part, base, depth + 1)

    def _at(self, found: Any, pointer: str, base: str) -> tuple[Any, str]:
        for step in (unquote(pointer) if "%" in pointer else pointer).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                _cannot()
            if isinstance(found, Mapping) and isinstance(id_ := found.get("$id"), str) and not id_.startswith("#"):
                base = urljoin(base, id_)
        return found, base


_MISSING = object()


# --- parts of schemas -------------------------------------------------------------------------------------------------


def _cannot() -> Never:
    raise _CannotSay


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _any_of(schemas: list[Any]) -> Any:
    return {"anyOf": schemas} if schemas else False


def _joined(out: dict[str, Any], both: list[Any]) -> Any:
    """With the schemas that must match, too."""
    for bound in ("minProperties", "maxProperties"):
        if f"{bound}!" in out:
            out[bound] = out.pop(f"{bound}!")
    both = [each for each in both if each is not True and each != {}]
    if False in both:
        return False
    if not out:
        out, both = (both[0], both[1:]) if both else ({}, [])
    if not both:
        return out
    if len(both) == 1 and isinstance(both[0], dict) and not set(both[0]) & set(out):
        return out | both[0]
    return out | {"allOf": [*out.get("allOf", ()), *both]}


def _names_of(schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The required names, and the others that are listed and may have a value."""
    required = list(dict.fromkeys(schema.get("required", ())))
    listed = schema.get("properties", {})
    return required, [name for name, each in listed.items() if name not in required and each is not False]


def _exactly(value: Any) -> Any:
    """A constant in the words of its parts."""
    if isinstance(value, list) and value:
        parts = [{"const": each} for each in value]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(value)}
    return {"type": "array", "maxItems": 0} if value == [] else {"const": value}


def _other_types(types: Sequence[str]) -> Any:
    if "integer" in types and "number" not in types:
        _cannot()
    return {"type": [each for each in _TYPES if each not in types]}


def _other_values(values: Sequence[Any]) -> Any:
    """All values but these. An object that has more properties than one of these is left out, too."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(_type_of(value), []).append(value)
    others: list[Any] = [{"type": [each for each in _TYPES if each not in kinds]}]
    if texts := kinds.get("string"):
        others.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    if numbers := sorted(set(kinds.get("number", ()))):
        edges = [None, *numbers, None]
        for low, high in pairwise(edges):
            bounds = {"exclusiveMinimum": low} if low is not None else {}
            others.append({"type": "number", **bounds, **({"exclusiveMaximum": high} if high is not None else {})})
    if kinds.get("boolean") in ([True], [False]):
        others.append({"const": not kinds["boolean"][0]})
    if arrays := kinds.get("array"):
        others.append(
            {"type": "array", "allOf": [{"not": _exactly(each) | {"maxItems": len(each)}} for each in arrays]}
        )
    if objects := kinds.get("object"):
        parts = [{"properties": {k: {"const": v} for k, v in each.items()}, "required": list(each)} for each in objects]
        others.append({"type": "object", "allOf": [{"not": each} for each in parts]})
    return {"anyOf": others}


def _other_texts(texts: Sequence[str]) -> str:
    """A regular expression of every text but these."""
    if sum(map(len, texts)) > _MAX_TEXTS or max(map(len, texts), default=0) > _MAX_TEXTS // 4:
        _cannot()
    heads: dict[str, list[str]] = {}
    for text in texts:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    if not heads:
        return "(?s:.+)" if "" in texts else "(?s:.*)"
    branches = [f"[^{''.join(map(_escape, heads))}](?s:.*)"]
    branches += [_escape(head) + _other_texts(tails) for head, tails in heads.items()]
    return f"(?:{'|'.join(branches)}){'' if '' in texts else '?'}"


def _escape(text: str) -> str:
    return _SYNTAX.sub(r"\\\g<0>", text)


def _type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    if "const" in schema or "enum" in schema:
        return set(map(_type_of, schema.get("enum", [schema.get("const")])))
    return {"number" if each == "integer" else each for each in _as_list(schema.get("type", list(_TYPES)))}


def _key(value: Any) -> str:
    """Equal for equal values of JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(key)}:{_key(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({_key(value): value for value in reversed(values)}.values())[::-1]


def _require_disjoint(out: dict[str, Any], word: str) -> None:
    """Patterns of properties, two of which might fit one name, cannot be said."""
    if word == "properties":
        return
    patterns = list(out[word])
    prefixes = [found[1] for each in patterns if "|" not in each and (found := _PREFIX.match(each))]
    apart = all(not a.startswith(b) and not b.startswith(a) for a, b in combinations(prefixes, 2))
    if not all(map(_is_regular, patterns)) or (len(patterns) > 1 and (len(prefixes) < len(patterns) or not apart)):
        _cannot()


def _endless(schemas: Mapping[str, Any]) -> list[str]:
    """Those that no finite value matches, because they need a value of themselves."""
    finite: set[str] = set()
    for _ in range(_MAX_DEPTH):
        found = {name for name, each in schemas.items() if name not in finite and _has_value(each, finite, 0)}
        finite |= found
        if not found:
            return [name for name in schemas if name not in finite]
    return []  # the engine decides


def _has_value(schema: Any, finite: set[str], depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return True
    return (
        ("$ref" not in schema or schema["$ref"] in finite)
        and all(_has_value(one, finite, depth + 1) for one in schema.get("allOf", ()))
        and ("anyOf" not in schema or any(_has_value(one, finite, depth + 1) for one in schema["anyOf"]))
        and all(_has_value(one, finite, depth + 1) for one in _needed_parts(schema))
    )


def _needed_parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a part of every value must match."""
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        yield from (properties[name] for name in schema.get("required", ()) if name in properties)
    if schema.get("type") == "array" and (least := schema.get("minItems", 0)):
        leading = schema.get("prefixItems", [])
        yield from leading[:least]
        if least > len(leading):
            yield schema.get("items", True)


# --- keywords ---------------------------------------------------------------------------------------------------------


def _well_formed(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keywords that mean something, in the words of draft 2020-12, and the names of malformed ones."""
    clean: dict[str, Any] = {}
    malformed: list[str] = []
    for word, value in schema.items():
        check = _CHECKS.get(word)
        if word == "items" and isinstance(value, list):  # in the older drafts
            if value and all(map(_is_schema, value)):
                clean["prefixItems"] = value
                clean |= {"items": schema["additionalItems"]} if _is_schema(schema.get("additionalItems")) else {}
            else:
                malformed.append(word)
        elif check is None or (word == "format" and isinstance(value, str) and value in _HINTS):
            continue
        elif not check(value):
            malformed.append(word)
        else:
            clean[word] = int(value) if word in _COUNTS else value
    return clean, malformed


def _is_regular(pattern: Any) -> bool:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        return False
    if _UNREGULAR.search(pattern.replace(r"\\", "/")):  # what follows an escaped backslash is not escaped
        return False
    if {"^", "$"} & set(_UNANCHORED.sub("", pattern)):
        return False
    classes = (found.group() for found in _UNANCHORED.finditer(pattern) if found.group().startswith("["))
    if any(map(_SET_OPERATION.search, classes)):
        return False
    try:
        re.compile(_FAR_CHARACTER.sub("\xff", pattern))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == value // 1


def _is_type(value: Any) -> bool:
    return value != [] and all(isinstance(one, str) and one in (*_TYPES, "integer") for one in _as_list(value))


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(check, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
_CHILDREN = ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_SCHEMAS = (*_CHILDREN, "items", "additionalProperties", "additionalItems")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_COUNTS = (*_BOUNDS, "minContains", "maxContains")
_IN_PLACE = {"allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "contains", *_REFERENCES}
_CLOSED = {
    "unevaluatedProperties": ("additionalProperties", ("properties", "patternProperties")),
    "unevaluatedItems": ("items", ("prefixItems",)),
}
_COUNTED = ("minProperties!", "maxProperties!")  # those that a grammar can count
_KEPT = {"type", "enum", "const", "required", "pattern", "format", "multipleOf", *_NUMBER_BOUNDS, *_BOUNDS, *_COUNTED}
_OTHER_THAN = {name: {"type": [each for each in _TYPES if each != name]} for name in ("array", "object")}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda _: True,
    "required": _is_names,
    "pattern": _is_regular,
    "format": lambda value: _is_text(value) and value in _FORMATS,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "uniqueItems": lambda value: isinstance(value, bool),
    "nullable": lambda _: True,
    "$id": _is_text,
    "dependentRequired": _is_map(_is_names),
    "dependencies": _is_map(lambda value: _is_schema(value) or _is_names(value)),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _is_map(_is_schema)),
    **dict.fromkeys(
        _LISTS_OF_SCHEMAS, lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value))
    ),
    **dict.fromkeys((*_CHILDREN, "items", "additionalProperties"), _is_schema),
    **dict.fromkeys(_REFERENCES, _is_text),
    **dict.fromkeys(_NUMBER_BOUNDS, _is_number),
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_COUNTED, _is_count),
}
_ASSERTIONS = frozenset(_CHECKS) - {"nullable", "$id"}
