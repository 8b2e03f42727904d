"""`python -m low_mem_t5` is `train_low_mem`."""

import os
import sys

from .program import find_program

program = find_program()
os.execv(program, [program, *sys.argv[1:]])
