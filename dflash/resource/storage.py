"""`spec.storage` and `spec.tracking`: where state lives, and where metrics go."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.resource.section import Section


class Storage(Section):
    """The S3 location that holds everything true about this Drafter."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description=(
            "s3://bucket/prefix, or a local folder, in which an embedded S3 server is then run. "
            "A relative path starts at the Drafter file's folder."
        ),
    )
    endpoint: str | None = Field(
        None, max_length=512, description="URL of an S3 server other than AWS, such as http://minio:9000."
    )
    region: str | None = Field(None, max_length=64, description="Region. Default: the environment's.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto", description="`auto` is path style for custom endpoints and virtual hosts for AWS."
    )
    secret_ref: str | None = Field(
        None,
        max_length=253,
        description=(
            "On a cluster: Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. "
            "On one machine the usual AWS variables and files are read."
        ),
    )
    deletion_policy: Literal["Retain", "Delete"] = Field(
        "Retain", description="What happens to the data when the resource is deleted."
    )


class Wandb(Section):
    """Weights & Biases. Without a key or a network, metrics still go to metrics.jsonl."""

    enabled: bool = Field(True, description="false writes metrics.jsonl only.")
    project: str = Field("dflash", min_length=1, max_length=128, description="Project.")
    entity: str | None = Field(None, max_length=128, description="Team or user. Default: the key's.")
    run_name: str | None = Field(
        None, max_length=128, description="Name. Default: the Drafter's name and hash."
    )
    mode: Literal["online", "offline"] = Field(
        "online", description="`offline` writes a folder to be sent later with `wandb sync`."
    )
    secret_ref: str | None = Field(
        None, max_length=253, description="On a cluster: Secret with WANDB_API_KEY."
    )


class Tracking(Section):
    """Metrics."""

    wandb: Wandb = Field(Wandb(), description="Weights & Biases.")
    interval_seconds: float = Field(10.0, gt=0.0, le=3600.0, description="Time between two rows of metrics.")
    gpu_hour_price: float | None = Field(
        None,
        ge=0.0,
        le=1e6,
        description=(
            "Price of one GPU for one hour, in any currency: what was spent and will be is then also told in "
            "money. On one machine all its GPUs count while a stage works; a machine without any counts as "
            "one."
        ),
    )
    cost_limit: float | None = Field(
        None,
        gt=0.0,
        le=1e12,
        description=(
            "Most that the Drafter should cost, at gpuHourPrice. A warm-up that foretells more is a no-go, "
            "and a run that is going to take more raises an alert; nothing is stopped."
        ),
    )

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.cost_limit is not None and not self.gpu_hour_price:
            raise ValueError("costLimit needs gpuHourPrice, from which the cost follows")
        return self
