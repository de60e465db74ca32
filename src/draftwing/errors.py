"""The errors a user can meet. Each says what was expected, what was found, and what to do about it."""

from collections.abc import Sequence

# Clients know by these words, or by the code "context_length_exceeded", that a conversation has to be made shorter.
TOO_LONG = "this model's maximum context length is"


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Returns the first names for an error message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class DraftwingError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DraftwingError):
    """An option, or a combination of options, that cannot work; raised before weights are loaded."""


class CheckpointError(DraftwingError):
    """A model file that cannot be served: missing or misshapen tensors, unsupported types or config keys."""


class GenerationError(DraftwingError):
    """An answer that cannot be given, though the request is right (HTTP 500)."""


class FileChanged(GenerationError):
    """A file of the model is another than it was."""


class ReceiptError(DraftwingError):
    """A receipt that cannot be checked: it was changed, or is of another model."""


class RequestError(DraftwingError):
    """A request that is refused. `param` names the offending field (HTTP 400). `code` is what clients know the reason
    by, where they can do something about it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(RequestError):
    """A request for something that is not there: a stored item, a model (HTTP 404)."""


class ContextError(RequestError):
    """A request that the context has no room for: tokens of its prompt, of the answer that it asks for (None: the
    prompt alone is too long), and of the context."""

    def __init__(self, message: str, param: str, prompt: int, asked: int | None, context: int) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.prompt, self.asked, self.context = prompt, asked, context
