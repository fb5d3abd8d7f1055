"""python -m tests.fuzz 'Draw(...)' [...]: runs draws that failed, one by one."""

from __future__ import annotations

import sys

from tests.fuzz.draws import Draw
from tests.fuzz.test_fuzz import check


def main() -> int:
    failures = [f for text in sys.argv[1:] for f in check([eval(text, {"Draw": Draw})]).values()]
    print("\n".join(failures) or "equal to the oracle")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
