"""`python -m legato.bench.soak_http`."""

import sys

from legato.bench.soak_http.run import main

sys.exit(main())
