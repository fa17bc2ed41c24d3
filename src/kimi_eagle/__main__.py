"""`python -m kimi_eagle` is `kimi-eagle`."""

from kimi_eagle.cli import main

if __name__ == "__main__":
    main()
