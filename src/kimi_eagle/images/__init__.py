"""Image files: making them, knowing them, pinning them.

`build.py` and `importing.py` make one (`wheels.py` fetches what goes in, `inside.py` and `sbom.py`
run within); `sif.py` reads what a file says of itself; `pins.py` and `lockfile.py` say whether it
is the one that is meant, `hashcache.py` remembers digests; `children.py` and `workplace.py` run
Apptainer and leave nothing behind.
"""
