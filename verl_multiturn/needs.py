"""What an environment needs beyond this package: packages, programs, data; and what is missing here."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Needs:
    """What an environment needs; the default is nothing.

    Attributes:
        extra: of setup.py, which installs `packages`; None: `packages` are installed by their own names.
        packages: import names.
        programs: executables on PATH, such as "java".
        data: what data of the user it can play and how to get it; None: it needs none.
        licence: of what is played, where it is not this package's.
    """

    extra: str | None = None
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    data: str | None = None
    licence: str = "Apache-2.0"

    @property
    def missing(self) -> list[str]:
        """The packages and programs that are not here."""
        packages = [name for name in self.packages if find_spec(name) is None]
        return packages + [name for name in self.programs if shutil.which(name) is None]

    @property
    def install(self) -> str:
        """What to type to get the packages."""
        if self.extra:
            return f'pip install "verl-multiturn[{self.extra}]"'
        return f"pip install {' '.join(name.replace('_', '-') for name in self.packages)}"

    def require(self, who: str) -> None:
        """Raise ImportError, with what to install, if something is missing."""
        if missing := self.missing:
            programs = [name for name in missing if name in self.programs]
            steps = [self.install] if len(missing) > len(programs) else []
            steps += [f"install {', '.join(programs)}"] if programs else []
            raise ImportError(f"{who} needs {', '.join(missing)}: {'; '.join(steps)}")
