"""What the pipeline does: one room per stage; nothing here knows Prefect, DVC or processes."""

import logging

# Where it is installed, diffusers imports it at once, and without a GPU it then advises on kernels nobody asked for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
