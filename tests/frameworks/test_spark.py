"""A dataset of `effllm runs --export DIR` is read by Spark: `make test-spark`."""

import pytest

import effllm
from effllm.analysis.export import export_parquet
from tests.run_folders import GOLDEN, write_run

pyspark = pytest.importorskip("pyspark")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(folder))
        .config("spark.local.dir", str(folder))
        .getOrCreate()
    )
    yield session
    session.stop()


def test_spark_reads_partitions_tags_and_replaced_rows(spark, tmp_path):
    """One project is escaped in the path; Spark returns an escaped letter outside of ASCII as Latin-1."""
    for name, project, speed in (("a", "x/y=[z] 1", 1.0), ("b", "ü", 2.0)):
        tags = [f"project={project}", "config=base"]
        write_run(tmp_path / "runs" / name, {"run_throughput/tokens_per_second": speed}, tags=tags)
    for path in (tmp_path / "runs", tmp_path / "runs/a"):
        export_parquet(effllm.load(path), tmp_path / "out")

    frame = spark.read.parquet(f"{tmp_path}/out/v5/runs")
    rows = frame.select("run_id", "project", "tags", "run_throughput_tokens_per_second").orderBy("run_id").collect()

    assert [(row.run_id, row.project, row[3]) for row in rows] == [("a", "x/y=[z] 1", 1.0), ("b", "Ã¼", 2.0)]
    assert rows[1].tags == {"project": "ü", "config": "base"}


def test_spark_reads_all_tables_with_their_partitions(spark, tmp_path):
    runs = effllm.load(GOLDEN)
    export_parquet(runs, tmp_path)

    for table in ("runs", "windows", "ranks", "events"):
        relation = getattr(runs, table)
        frame = spark.read.parquet(f"{tmp_path}/v5/{table}")
        assert frame.count() == len(relation)
        assert set(relation.columns) | {"project", "month"} == set(frame.columns)
    spark.read.parquet(f"{tmp_path}/v5/windows").createOrReplaceTempView("windows")
    [(month, tokens, energy_j)] = spark.sql(
        "SELECT month, sum(tokens), sum(energy_j) FROM windows GROUP BY month"
    ).collect()
    assert month == "2026-11"
    assert (tokens, energy_j) == pytest.approx(runs.sql("SELECT sum(tokens), sum(energy_j) FROM windows").fetchone())
    frame = spark.read.parquet(f"{tmp_path}/v5/runs")
    [row] = frame.select("run_id", "project", "hosts", "goodput_seconds", "config").collect()
    assert (row.run_id, row.project, row.hosts) == ("run_folder_5", "llama", ["vm"])
    assert row.goodput_seconds == runs.runs.select("goodput_seconds").fetchone()[0]
    assert '"device":"nvml"' in row.config
