"""Every error that the product raises on purpose, and the exit code each ends the command with.

    BatchGenError
    ├── UsageError            2   wrong flag or value, contradictory options
    │   ├── OutputExistsError 2   the output is there and neither --resume nor --overwrite was given
    │   └── ParameterError    2   a sampling parameter has a wrong name, type or value; in an input line: RowError
    ├── ModelError            3   the model cannot be loaded
    │   ├── CheckpointError   3   damaged, incomplete or hostile files
    │   ├── UnsupportedError  3   an architecture, quantisation or option that we do not implement
    │   └── TokenizerError    3   no usable tokenizer or chat template
    ├── BudgetError           4   it does not fit; the message gives the smallest budget that does
    ├── StorageError          5   reading or writing failed; finished work is saved
    └── RowError              -   one row's own fault: becomes its error record, the others go on

Messages say what is wrong, the value met, the limit, and the next step.
"""

from __future__ import annotations


class BatchGenError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 70


class UsageError(BatchGenError):
    """The user asked for something that cannot be done as asked."""

    exit_code = 2


class OutputExistsError(UsageError):
    """The output file exists and the user did not say whether to resume or to overwrite."""


class ParameterError(UsageError):
    """A parameter has an unknown name, a wrong type or a value out of range; ``param`` names it."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def as_row_error(self) -> RowError:
        """The same fault, found in an input line: it fails that row only."""
        return RowError(self.code, str(self), param=self.param)


class ModelError(BatchGenError):
    """The model cannot be loaded."""

    exit_code = 3


class CheckpointError(ModelError):
    """Checkpoint files are damaged, incomplete, inconsistent or unsafe."""


class UnsupportedError(ModelError):
    """The model needs something that is not implemented; named in the message."""


class TokenizerError(ModelError):
    """No usable tokenizer or chat template."""


class BudgetError(BatchGenError):
    """The model or the job does not fit into the budget. ``smallest``: bytes of the smallest one that would do, where
    it is known."""

    exit_code = 4

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class StorageError(BatchGenError):
    """A read or a write failed during the run; work finished so far is saved."""

    exit_code = 5


class RowError(BatchGenError):
    """One row cannot be answered. ``code`` is stable and documented; ``param`` names the field at fault."""

    exit_code = 1

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
