"""A few records of a state file."""

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.tuning.records import MetricRecord, NoiseRecord, RangesRecord, Record

RECORDS: tuple[Record, ...] = (
    RangesRecord(ranges=Ranges({"x": Range(-1e-05, 0.1 + 0.2)})),
    NoiseRecord(of="0.1", alone={"a": 1e-05, "b": 2.5e-05, "c": 1e22, "d": 5e-324, '"\\ 3e5, "crc": "0"}': 1.0}),
    NoiseRecord(of='a "quoted" \\ name: 3e5, "crc": "0"}', alone={"größe\n/x/1e-05:0": -7.0}),
)
MORE = MetricRecord(of="more", value=1.0)
