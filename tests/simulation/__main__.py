"""`python -m simulation`: see `many`. Apart from it, as processes of their own find no function in a `__main__`."""

from simulation.many import main

if __name__ == "__main__":
    main()
