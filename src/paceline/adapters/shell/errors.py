"""The error of text that is no shell script."""


class ShellSyntaxError(ValueError):
    """The text ends inside a quote, a bracket or a compound command; the message names the line it began on."""
