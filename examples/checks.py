"""Collects checks, each with its figure and bound. An example prints ``ok`` only if all of them held."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """Holds the result of comparing one figure with a bound."""

    what: str
    figure: str
    bound: str
    held: bool


@dataclass
class CheckList:
    """Collects checks. A NaN never holds: comparing it with any bound is false."""

    checks: list[Check] = field(default_factory=list)

    def at_most(self, what: str, figure: float, bound: float) -> None:
        self.checks.append(Check(what, f"{figure:.4g}", f"<= {bound:.4g}", figure <= bound))

    def at_least(self, what: str, figure: float, bound: float) -> None:
        self.checks.append(Check(what, f"{figure:.4g}", f">= {bound:.4g}", figure >= bound))

    def equal(self, what: str, figure: object, expected: object) -> None:
        self.checks.append(Check(what, str(figure), f"== {expected}", bool(figure == expected)))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.held]

    def finish(self, name: str) -> int:
        """Prints all checks and the verdict. Returns the exit status: 0 if there were checks and all held, else 1."""
        what_width = max((len(check.what) for check in self.checks), default=0)
        figure_width = max((len(check.figure) for check in self.checks), default=0)
        bound_width = max((len(check.bound) for check in self.checks), default=0)
        print("\nChecks")
        for check in self.checks:
            columns = f"{check.what:{what_width}}  {check.figure:>{figure_width}}  {check.bound:{bound_width}}"
            print(f"  {columns}  {'ok' if check.held else 'FAILED'}")
        if not self.checks:
            print(f"{name}: FAILED (nothing was checked)")
            return 1
        if self.failed:
            failed = "; ".join(check.what for check in self.failed)
            print(f"{name}: FAILED ({len(self.failed)} of {len(self.checks)} checks: {failed})")
            return 1
        print(f"{name}: ok")
        return 0
