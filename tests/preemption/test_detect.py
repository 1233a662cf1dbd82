"""Which cloud this is, and which listeners fit; found out without a single packet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.errors import UsageError
from ckpt.preemption.detect import Cloud, Endpoints, listeners, which_cloud
from tests.preemption.fakes import connections

AWS_ADDRESS = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338"}
MACHINES: dict[str, tuple[dict[str, str], Cloud | None]] = {
    "EC2, Nitro": ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge", "bios_vendor": "Amazon EC2"}, Cloud.AWS),
    "EC2, Xen": ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, Cloud.AWS),
    "EC2, metal": ({"sys_vendor": "Intel", "board_vendor": "Amazon EC2"}, Cloud.AWS),
    "Compute Engine": ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, Cloud.GCP),
    "Azure": (
        {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
        Cloud.AZURE,
    ),
    "Hyper-V at home": ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "1234-5678"}, None),
    "a Chromebook": ({"sys_vendor": "Google", "product_name": "Eve"}, None),
    "a server": ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge R750", "bios_version": "1.8.2"}, None),
    "a sandbox": ({}, None),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_cloud_is_read_from_the_firmwares_tables_alone(machine: str, tmp_path: Path) -> None:
    files, cloud = MACHINES[machine]
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    (folder / "product_serial").mkdir()  # unreadable
    with connections() as seen:
        assert which_cloud(tmp_path) is cloud
    assert not seen


def names(cloud: Cloud | None, variables: dict[str, str] | None = None, **more: object) -> list[str]:
    with connections() as seen:
        found = [each.name for each in listeners(cloud, Endpoints.from_variables(variables or {}), **more)]  # type: ignore[arg-type]
    assert not seen
    return found


def test_each_cloud_gets_its_listeners_and_no_cloud_none() -> None:
    assert names(Cloud.AWS) == ["aws"]
    assert names(Cloud.GCP) == ["gcp-preempted", "gcp-maintenance"]
    assert names(Cloud.AZURE) == ["azure"]
    assert names(None) == []


def test_slurm_and_a_file_come_on_top(tmp_path: Path) -> None:
    assert names(Cloud.AWS, slurm_job="7", file=tmp_path / "leave") == ["aws", "slurm", "file"]
    assert names(None, slurm_job="7", slurm_end_s=1e9) == ["slurm"]


def test_ec2_can_be_switched_off_as_in_the_sdks() -> None:
    assert names(Cloud.AWS, {"AWS_EC2_METADATA_DISABLED": "true"}) == []
    assert names(Cloud.AWS, {"AWS_EC2_METADATA_DISABLED": "True", **AWS_ADDRESS}) == []
    assert names(Cloud.AWS, {"AWS_EC2_METADATA_DISABLED": "false"}) == ["aws"]


def test_an_address_that_was_given_is_word_that_the_service_is_there() -> None:
    assert names(None, AWS_ADDRESS) == ["aws"]
    assert names(None, {"GCE_METADATA_HOST": "127.0.0.1:1338"}) == ["gcp-preempted", "gcp-maintenance"]
    assert names(None, {"CKPT_AZURE_METADATA_ENDPOINT": "http://127.0.0.1:1338"}) == ["azure"]


def test_the_usual_addresses_are_the_documented_ones() -> None:
    def endpoint(cloud: Cloud, variables: dict[str, str]) -> str:
        return listeners(cloud, Endpoints.from_variables(variables))[0]._service.endpoint  # type: ignore[attr-defined]

    assert {endpoint(cloud, {}) for cloud in Cloud} == {"http://169.254.169.254"}
    assert endpoint(Cloud.AWS, {"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}) == "http://[fd00:ec2::254]"
    assert endpoint(Cloud.AWS, AWS_ADDRESS) == "http://127.0.0.1:1338"


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="ftp://here"):
        names(None, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "ftp://here"})


def test_the_listeners_load_neither_torch_numpy_nor_http_before_they_ask() -> None:
    unwanted = "{'torch', 'numpy', 'http.client'}"
    code = f"import sys, ckpt.preemption.detect, ckpt.preemption.signals; print({unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_table_that_is_no_text_or_huge_says_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    (folder / "sys_vendor").write_bytes(b"\xff" * (1 << 20))
    (folder / "product_name").mkdir()
    assert which_cloud(tmp_path) is None
    assert which_cloud(tmp_path / "nowhere") is None
