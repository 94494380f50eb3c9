"""Numbers of things in sentences: "1 group waits", "2,000 groups wait"."""

_OF_ONE = {"are": "is", "were": "was", "have": "has", "do": "does"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number of things, and what they do, such as "1 group waits" or "2 groups wait"."""
    things = f"{number:,} {noun}{'' if number == 1 else 's'}"
    return f"{things} {agreeing(number, verb)}" if verb else things


def agreeing(number: int, verb: str) -> str:
    """Return a verb in the present, or "were", as a number of things needs it."""
    return _OF_ONE.get(verb, f"{verb}s") if number == 1 else verb
