"""Our symbols for terminals whose character set lacks them: one plain character each, so that columns stay. Pure."""

PLAIN = str.maketrans("│─└▶●▲✖·…—–→↑↓⏎°▁▂▃▄▅▆▇█", "|-`>*^x..-->^v<o.:-=+*#@")


def substitute(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream cannot encode; see ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(PLAIN)
    return "".join(char if char.isascii() else "?" for char in plain), error.end
