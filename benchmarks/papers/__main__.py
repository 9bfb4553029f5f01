"""`python benchmarks/papers`; see `papers.runner`."""

import sys
from pathlib import Path

# as a script, its own folder is on the path in place of the one that it is found from
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from papers.runner import main

if __name__ == "__main__":
    sys.exit(main())
