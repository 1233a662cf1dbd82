"""The choice of listeners that fit this machine, from the firmware's tables and the environment.

Nothing is asked over the network. Sources: EC2 User Guide, "Identify EC2 instances"; Compute Engine, "Detect if a VM is
running in Compute Engine"; cloud-init's DataSourceAzure (the asset tag of every Azure VM's chassis).
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
from ckpt.preemption.metadata import ADDRESS
from ckpt.preemption.notice import FirstDeadlines, Listener
from ckpt.preemption.slurm import SlurmListener

DMI = Path("sys/class/dmi/id")
DMI_BYTES_MAX = 256
AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"

ADDRESS_IPV6 = "http://[fd00:ec2::254]"  # of EC2

# The variables that `Endpoints.from_variables` reads. All but the last are the providers' own; Azure's libraries have
# none for this service.
VARIABLES = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_EC2_METADATA_DISABLED",
    "GCE_METADATA_HOST",
    "CKPT_AZURE_METADATA_ENDPOINT",
)


class Cloud(enum.Enum):
    """A cloud with a metadata service that ckpt knows."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The configured addresses of the metadata services; "" means that none is configured and the usual address is
    used.

    A configured address means that the service is present, whatever the firmware says.
    """

    aws: str = ""
    aws_is_ipv6: bool = False
    aws_is_disabled: bool = False
    gcp: str = ""
    azure: str = ""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Endpoints:
        """From the values of VARIABLES that are set. Other variables are ignored."""
        return cls(
            aws=variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ""),
            aws_is_ipv6=variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6",
            aws_is_disabled=variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true",
            gcp=variables.get("GCE_METADATA_HOST", ""),
            azure=variables.get("CKPT_AZURE_METADATA_ENDPOINT", ""),
        )


def which_cloud(root: Path = Path("/")) -> Cloud | None:
    """The cloud that this machine runs in, by the firmware's tables below `root`; None for none of the three.

    Missing and unreadable files count as empty. Some sandboxes (gVisor) show none at all.
    """

    def says(name: str) -> str:
        try:
            with open(root / DMI / name, "rb") as file:
                return file.read(DMI_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (says("sys_vendor"), says("bios_vendor"), says("board_vendor")) or "amazon" in says(
        "bios_version"
    ):  # bios_version: instances on Xen
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
    first: FirstDeadlines | None = None,
) -> list[Listener]:
    """The listeners that fit this machine, not yet started. Signals are not among them (see ckpt.preemption.signals).

    `slurm_job`, `slurm_end_s`: SLURM_JOB_ID and SLURM_JOB_END_TIME; "" and None where they are not set.
    `refused`: called with a listener's name and the error for an invalid address or job id; the other listeners are
    still made. Errors: without `refused` that UsageError is raised.
    `first`: the deadlines that earlier listeners recorded, which the new ones continue.
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
        usual = ADDRESS_IPV6 if endpoints.aws_is_ipv6 else ADDRESS
        made(AwsListener.name, lambda: AwsListener(endpoints.aws or usual, events=events, first=first))
    if endpoints.gcp or cloud is Cloud.GCP:
        address = endpoints.gcp or ADDRESS
        made(PREEMPTED.source, lambda: GcpListener(PREEMPTED, address, events=events, first=first))
        made(MAINTENANCE.source, lambda: GcpListener(MAINTENANCE, address, events=events, first=first))
    if endpoints.azure or cloud is Cloud.AZURE:
        made(AzureListener.name, lambda: AzureListener(endpoints.azure or ADDRESS, events=events, first=first))
    if slurm_job:
        made(SlurmListener.name, lambda: SlurmListener(slurm_job, slurm_end_s, events=events))
    if file is not None:
        made(FileListener.name, lambda: FileListener(Path(os.path.abspath(file)), events=events, first=first))
    return found
