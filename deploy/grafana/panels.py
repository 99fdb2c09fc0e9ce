"""The parts that both dashboards are made of: variables, queries, and panels that all look alike.

Every panel has a title, a description that says what is normal, a unit, and the data source that the dashboard's first
variable names. Nothing here knows a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as models

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, ORANGE, RED, BLUE, GREY = "green", "orange", "red", "blue", "#808080"
ON_OFF = {"0": ("off", GREY), "1": ("on", GREEN)}

Query = prometheus.Dataquery
Steps = Sequence[tuple[float | None, str]]


def query(
    expression: str, legend: str = "", *, name: str = "A", instant: bool = False, as_table: bool = False
) -> Query:
    built = (
        prometheus.Dataquery().expr(expression).ref_id(name).datasource(DATASOURCE).legend_format(legend or "__auto")
    )
    built.format("table" if as_table else "time_series")
    return built.instant() if instant else built.range()


def queries(*pairs: tuple[str, str]) -> list[Query]:
    """Named A, B, C in the order given; each is an expression and its legend."""
    return [query(expression, legend, name="ABCDEFGH"[index]) for index, (expression, legend) in enumerate(pairs)]


def steps(limits: Steps) -> dashboard.ThresholdsConfig:
    """From below upwards; the first limit is None."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in limits])
    )


def words(meanings: dict[str, tuple[str, str]]) -> list[models.ValueMapping]:
    """A text and a color instead of a number."""
    results = {
        value: models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(meanings.items())
    }
    return [models.ValueMap(options=results)]


def number(
    title: str,
    description: str,
    what: Query,
    *,
    unit: str = units.Short,
    width: int = 4,
    limits: Steps = ((None, GREEN),),
    meanings: dict[str, tuple[str, str]] | None = None,
) -> stat.Panel:
    """One number, as it is now."""
    built = _dressed(stat.Panel(), title, description, unit, width, 4).targets([what]).thresholds(steps(limits))
    if meanings:
        built.mappings(words(meanings))
    return (
        built.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
    )


def label(title: str, description: str, what: Query, *, width: int) -> stat.Panel:
    """What the query's legend says, in words."""
    return (
        _dressed(stat.Panel(), title, description, units.String, width, 4)
        .targets([what])
        .text_mode(common.BigValueTextMode.NAME)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def graph(
    title: str,
    description: str,
    what: list[Query],
    *,
    unit: str = units.Short,
    width: int = 12,
    stacked: bool = False,
    bars: bool = False,
) -> timeseries.Panel:
    """Lines over time, with what each was last and at most in the legend."""
    built = (
        _dressed(timeseries.Panel(), title, description, unit, width, 8)
        .targets(what)
        .min(0)
        .line_width(1)
        .fill_opacity(60 if bars else 15)
        .show_points(common.VisibilityMode.NEVER)
        .draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if stacked:
        built.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    return built


def limit_line(panel: timeseries.Panel, legend: str) -> timeseries.Panel:
    """The series of that legend as a dashed line without filling: a limit, not a measurement."""
    return panel.override_by_name(
        legend,
        [
            models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
            models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": ORANGE}),
        ],
    )


def switches(title: str, description: str, what: list[Query], *, width: int = 12) -> statetimeline.Panel:
    """When it was on and when off."""
    return (
        _dressed(statetimeline.Panel(), title, description, units.Short, width, 8)
        .targets(what)
        .mappings(words(ON_OFF))
        .thresholds(steps([(None, GREY), (1, GREEN)]))
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(80)
    )


def rows(
    title: str, description: str, columns: dict[str, tuple[str, str]], *, keys: list[str], link: tuple[str, str]
) -> table.Panel:
    """A table: a line for each set of `keys`, and a column for each query; the least of the first one on top.

    `columns`: header to (query, unit).
    `link` is a title and the address that a click on the second key leads to.
    """
    names = dict(zip("ABCDEFGH", columns, strict=False))
    built = _dressed(table.Panel(), title, description, units.Short, 24, 9)
    built.sort_by([common_builders.TableSortByFieldState().display_name(names["A"]).desc(False)])
    built.targets([query(columns[names[n]][0], name=n, instant=True, as_table=True) for n in names])
    built.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    order = {key: place for place, key in enumerate([*keys, *(f"Value #{n}" for n in names)])}
    renamed = {f"Value #{n}": header for n, header in names.items()}
    options: dict[str, Any] = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": renamed}
    built.with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    for header, (_, unit) in columns.items():
        built.override_by_name(header, [models.DynamicConfigValue(id_val="unit", value=unit)])
    links = [{"title": link[0], "url": link[1]}]
    return built.override_by_name(keys[1], [models.DynamicConfigValue(id_val="links", value=links)])


def colored(panel: table.Panel, header: str, limits: Steps) -> table.Panel:
    """The text of a table's column in the color of its value."""
    return panel.override_by_name(
        header,
        [
            models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
            models.DynamicConfigValue(id_val="thresholds", value=steps(limits).build()),
        ],
    )


def _dressed(panel: Any, title: str, description: str, unit: str, width: int, height: int) -> Any:
    return panel.title(title).description(description).unit(unit).span(width).height(height).datasource(DATASOURCE)


def source_variable() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def series_variable(name: str, text: str, *, several: bool) -> dashboard.QueryVariable:
    """A choice among a label's values, listed by the query `text`. "All" also means those without one."""
    built = (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(DATASOURCE)
        .query({"query": text, "refId": name})
        .definition(text)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(several)
        .include_all(several)
    )
    if several:
        built.all_value(".*").current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return built


def events(name: str, expression: str, *, title: str, text: str, tags: str, color: str) -> dashboard.AnnotationQuery:
    """Marks on every graph where the expression has a value."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(color)
        .expr(expression)
        .step("15s")
        .title_format(title)
        .text_format(text)
        .tag_keys(tags)
    )


def board(uid: str, title: str, description: str) -> dashboard.Dashboard:
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["kv-canary"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(source_variable())
    )
