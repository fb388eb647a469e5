"""A few values of a state file, by key."""

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.tuning.records import RangesRecord

RECORDS = {
    "ranges": RangesRecord(ranges=Ranges({"x": Range(-1e-05, 0.1 + 0.2)})),
    "noise:0.1": {"a": 1e-05, "b": 2.5e-05, "c": 1e22, "d": 5e-324, '"\\ 3e5, "crc": "0"}': 1.0},
    'noise:a "quoted" \\ name: 3e5, "crc": "0"}': {"größe\n/x/1e-05:0": -7.0},
}
MORE = "more", 1.0
