"""Charts: where marks stand follows from values, and what lies outside of an axis stands at its end."""

from qdqtune.explanation.charts import MOST_DOTS, Axis, dots, of_strips, scatter, spanning
from qdqtune.explanation.report_values import Point, Speed, Strip


def test_values_have_their_place_on_an_axis_and_ticks_are_round() -> None:
    axis = Axis(1.0, 3.0)
    assert [axis.place(value) for value in (0.5, 1.0, 1.5, 3.0, 9.0)] == [0.0, 0.0, 25.0, 100.0, 100.0]
    assert axis.ticks(4) == (1.0, 1.5, 2.0, 2.5, 3.0)
    assert spanning([2.0, 4.0], pad=0.1) == Axis(1.8, 4.2)
    assert spanning([5.0]).low < 5.0 < spanning([5.0]).high


def test_strips_share_an_axis_that_few_outliers_do_not_stretch() -> None:
    rounds = (*(1.5 + n / 1000 for n in range(199)), 50.0)
    strip = Strip("a", rounds, Speed(1.6, 1.55, None))
    axis = of_strips([strip])
    assert axis.low < 1.0 < 1.7 < axis.high < 2.0
    drawn = dots(strip, axis).split("M")[1:]
    assert len(drawn) == MOST_DOTS
    assert drawn[-1].startswith("1000 ")


def test_equal_outputs_stand_at_the_top_of_the_chart_of_points() -> None:
    points = [
        Point(name, Speed(speed), db, False, True, True) for name, speed, db in (("a", 1.5, 20.0), ("b", 1.2, None))
    ]
    chart = scatter(points, floor_db=30.0, height=100)
    assert chart.down(None) == 0.0
    assert 0.0 < chart.down(30.0) < chart.down(20.0) < 100.0
    assert 0.0 < chart.x.place(1.0) < chart.x.place(1.2) < chart.x.place(1.5) < 100.0
