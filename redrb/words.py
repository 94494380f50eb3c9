"""Words for people: numbers of things ("1 group waits"), hosts, and what a terminal may show."""

_OF_ONE = {"are": "is", "were": "was", "have": "has", "do": "does"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number of things, and what they do, such as "1 group waits" or "2 groups wait"."""
    things = f"{number:,} {noun}{'' if number == 1 else 's'}"
    return f"{things} {agreeing(number, verb)}" if verb else things


def agreeing(number: int, verb: str) -> str:
    """Return a verb in the present, or "were", as a number of things needs it."""
    return _OF_ONE.get(verb, f"{verb}s") if number == 1 else verb


def bracketed(host: str) -> str:
    """Return a host as a URL has it: an address of IPv6 stands in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server at an address."""
    return host in ("127.0.0.1", "::1", "localhost")


def printable(text: str) -> str:
    """Return a text with U+FFFD for each control character: a terminal would obey these.

    Names and messages from Redis may hold them. Characters that change the direction of text, and
    line breaks, count too.
    """
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, such as a message, with each of its lines printable."""
    return "\n".join(map(printable, text.split("\n")))
