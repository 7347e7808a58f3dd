"""Errors that PARSE raises itself: one sentence each, which names the value and the way out.

All are ValueErrors, so that `except ValueError` catches them too. A missing file or server remains an OSError.
"""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: a lone half of a surrogate pair cannot, and tokenizers fail on it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ParseError(ValueError):
    """A value, a file or an answer that PARSE refuses. The base of all classes below."""


class SettingsError(ParseError):
    """A generation setting or an option that is out of range, unknown, or does not fit another one."""


class PromptError(ParseError):
    """A prompt or a draft text that is empty, too long, or refused by the chat template."""


class ChatTemplateError(PromptError):
    """Messages on which a chat template fails."""


class ModelError(ParseError):
    """A model, adapter or head that is damaged, unsupported, or made for another model."""


class CalibrationError(ParseError):
    """A risk level that the calibration does not show, or a calibration of other models."""


class ServerError(ParseError):
    """A server with the wrong model, or with an unusable response."""
