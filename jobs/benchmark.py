"""Submit the benchmark stage alone: acceptance and speed on held-out prompts.

    python jobs/benchmark.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only benchmark`, with the same options; it waits
behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "benchmark", *sys.argv[1:]])
