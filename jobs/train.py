"""Submit the train stage alone: speculators' EAGLE-3 trainer over the stored states.

    python jobs/train.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only train`, with the same options; it waits
behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "train", *sys.argv[1:]])
