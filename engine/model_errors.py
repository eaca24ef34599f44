"""What can be wrong with a model that is to be loaded. Always true: whatever a file holds, loading ends in one of these."""

from __future__ import annotations


class ModelError(Exception):
    """The model can't be loaded. The message says what was found, and where."""


class ModelNotFound(ModelError):
    """No such folder, file or Hugging Face id, or the folder holds no weights."""


class UnsupportedModel(ModelError):
    """An architecture, or a variant of one, that this engine doesn't compute. `what`: the entry that was found."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class DamagedModel(ModelError):
    """A file that is cut short or isn't what its name says."""


class TensorMismatch(ModelError):
    """The weights aren't those of the config. missing, unexpected: names; wrong_shape: name, shape found, shape needed."""

    def __init__(
        self,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (),
    ) -> None:
        said = []
        if missing:
            said.append(f"missing: {_some(missing)}")
        if unexpected:
            said.append(f"unexpected: {_some(unexpected)}")
        if wrong_shape:
            said.append("wrong shape: " + _some(tuple(f"{n} is {found}, not {need}" for n, found, need in wrong_shape)))
        super().__init__("the weights don't fit the config; " + "; ".join(said))
        self.missing, self.unexpected, self.wrong_shape = missing, unexpected, wrong_shape


class TokenizerMissing(ModelError):
    """The model comes without a tokenizer that this engine can read."""


class NoChatTemplate(ModelError):
    """The model comes without a chat template."""


def _some(names: tuple[str, ...], most: int = 4) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
