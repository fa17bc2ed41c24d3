"""Submit the extract stage alone: the verifier's hidden states for every sample.

    python jobs/extract.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only extract`, with the same options; it waits
behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "extract", *sys.argv[1:]])
