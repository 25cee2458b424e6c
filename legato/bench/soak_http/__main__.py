"""`python -m legato.bench.soak_http`: the soak as a command.

Owns the exit code and nothing else; `run` has the flags. Called by `make soak-http`.
"""

import sys

from legato.bench.soak_http.run import main

if __name__ == "__main__":
    sys.exit(main())
