"""Which listeners fit this machine. Nothing is asked over the network: the firmware's tables say whose machine it is.

Sources: EC2 User Guide, "Identify EC2 instances"; Compute Engine, "Detect if a VM is running in Compute Engine";
cloud-init's DataSourceAzure (the asset tag of every Azure VM's chassis).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.preemption.aws import AwsListener
from ckpt.preemption.azure import AzureListener
from ckpt.preemption.files import FileListener
from ckpt.preemption.gcp import MAINTENANCE, PREEMPTED, GcpListener
from ckpt.preemption.notice import First, Listener
from ckpt.preemption.slurm import SlurmListener

DMI = Path("sys/class/dmi/id")
DMI_BYTES_MAX = 256
AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"

AWS_ADDRESS = "http://169.254.169.254"
AWS_ADDRESS_IPV6 = "http://[fd00:ec2::254]"
GCP_ADDRESS = "http://169.254.169.254"
AZURE_ADDRESS = "http://169.254.169.254"

# What Endpoints.read looks at. All but the last are the providers' own; Azure's libraries have none for this service.
VARIABLES = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_EC2_METADATA_DISABLED",
    "GCE_METADATA_HOST",
    "CKPT_AZURE_METADATA_ENDPOINT",
)


class Cloud(enum.Enum):
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where metadata services are, as far as somebody said so; "": nobody did, so that the usual address serves.

    An address that was given is word that the service is there, whatever the firmware says.
    """

    aws: str = ""
    aws_is_ipv6: bool = False
    aws_is_disabled: bool = False
    gcp: str = ""
    azure: str = ""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Endpoints:
        """From the values of VARIABLES that are set; what else is in there does not matter."""
        return cls(
            aws=variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ""),
            aws_is_ipv6=variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6",
            aws_is_disabled=variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true",
            gcp=variables.get("GCE_METADATA_HOST", ""),
            azure=variables.get("CKPT_AZURE_METADATA_ENDPOINT", ""),
        )


def which_cloud(root: Path = Path("/")) -> Cloud | None:
    """The cloud that this machine is in, by the files of the firmware's tables below `root`; None: none of the three.

    Files that are missing or unreadable say nothing. Some sandboxes (gVisor) show none at all.
    """

    def says(name: str) -> str:
        try:
            with open(root / DMI / name, "rb") as file:
                return file.read(DMI_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (says("sys_vendor"), says("bios_vendor"), says("board_vendor")) or "amazon" in says(
        "bios_version"
    ):  # the version: instances on Xen
        return Cloud.AWS
    if says("product_name").startswith("Google"):
        return Cloud.GCP
    if says("chassis_asset_tag") == AZURE_CHASSIS:
        return Cloud.AZURE
    return None


def listeners(
    cloud: Cloud | None,
    endpoints: Endpoints,
    *,
    slurm_job: str = "",
    slurm_end_s: float | None = None,
    file: Path | None = None,
    events: Events | None = None,
    refused: Callable[[str, UsageError], None] | None = None,
    first: First | None = None,
) -> list[Listener]:
    """Those that fit; signals are not among them (see ckpt.preemption.signals). Starts nothing.

    `slurm_job`, `slurm_end_s`: SLURM_JOB_ID and SLURM_JOB_END_TIME, "" and None where they are not set.
    `refused`: told of an address or a job id that cannot be one, and which listener it was for; the others are made all
    the same. Errors: that UsageError, where nobody is to be told. `first`: what listeners before these have seen, and
    these go on with.
    """
    found: list[Listener] = []

    def made(name: str, make: Callable[[], Listener]) -> None:
        try:
            found.append(make())
        except UsageError as exc:
            if refused is None:
                raise
            refused(name, exc)

    if not endpoints.aws_is_disabled and (endpoints.aws or cloud is Cloud.AWS):
        usual = AWS_ADDRESS_IPV6 if endpoints.aws_is_ipv6 else AWS_ADDRESS
        made(AwsListener.name, lambda: AwsListener(endpoints.aws or usual, events=events, first=first))
    if endpoints.gcp or cloud is Cloud.GCP:
        address = endpoints.gcp or GCP_ADDRESS
        made(PREEMPTED.source, lambda: GcpListener(PREEMPTED, address, events=events, first=first))
        made(MAINTENANCE.source, lambda: GcpListener(MAINTENANCE, address, events=events, first=first))
    if endpoints.azure or cloud is Cloud.AZURE:
        made(AzureListener.name, lambda: AzureListener(endpoints.azure or AZURE_ADDRESS, events=events, first=first))
    if slurm_job:
        made(SlurmListener.name, lambda: SlurmListener(slurm_job, slurm_end_s, events=events))
    if file is not None:
        made(FileListener.name, lambda: FileListener(Path(os.path.abspath(file)), events=events, first=first))
    return found
