"""`python -m sonicmoe`: the console command where no script was installed."""

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="sonicmoe")
