import sys

from dynarl.slurm.mini.cli import main

sys.exit(main())
