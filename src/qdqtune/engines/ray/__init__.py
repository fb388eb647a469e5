"""Workers on the machines of a Ray cluster."""

NODE_LOST = (
    "the Ray node that the run was connected through is lost, and the run with it: the same command goes on from what "
    "was measured"
)
