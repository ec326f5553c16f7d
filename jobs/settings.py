"""What each job is told: one class a job, filled from flags, `DFLASH_*` variables and a file.

A flag wins over a variable, a variable over the file that `DFLASH_SETTINGS` names (YAML or JSON).
So the same job is started by hand, by the local executor or in a pod, with nothing in between.
Everything that concerns *what* is made lies in the resource; settings only say which share of the
work is this process's.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from dflash.errors import ConfigurationError
from dflash.resource import Drafter
from dflash.resource.load import load_resource

SETTINGS_FILE = "DFLASH_SETTINGS"


class JobSettings(BaseSettings):
    """What every job is told. Read with `read()`; never built from a resource's fields."""

    model_config = SettingsConfigDict(
        env_prefix="DFLASH_", extra="forbid", frozen=True, cli_kebab_case=True, cli_hide_none_type=True
    )

    resource: Path = Field(description="The resolved Drafter: absolute paths, storage at an s3:// address.")

    @classmethod
    def read(cls, arguments: list[str] | None = None) -> Self:
        """Settings of this process; ConfigurationError names the flag that is missing or wrong.

        `arguments` default to the process's own command line.
        """
        given = sys.argv[1:] if arguments is None else arguments
        try:
            source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
                cls, cli_parse_args=given, cli_exit_on_error=False
            )
            return cls(_cli_settings_source=source)
        except SettingsError as error:
            raise ConfigurationError(f"{cls.__name__}: {error}; --help lists the flags") from error
        except ValidationError as error:
            wrong = "; ".join(
                f"--{'-'.join(str(p) for p in e['loc']).replace('_', '-')}: {e['msg']}"
                for e in error.errors()
            )
            raise ConfigurationError(
                f"{cls.__name__}: {wrong}; give the flag or its DFLASH_* variable (--help lists them)"
            ) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments, variables, then the file; flags are put in front by `read`."""
        del dotenv_settings, file_secret_settings
        file = os.environ.get(SETTINGS_FILE)
        if file is None:
            return init_settings, env_settings
        # JSON is read by the same parser: it is YAML in flow style.
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=file)

    def load_resource(self) -> Drafter:
        """The Drafter this process works for."""
        return load_resource(self.resource)


class GenerateSettings(JobSettings):
    """`python -m jobs.generate`: answers a share of the prompts."""

    dataset: str = Field(description="Hash that names the dataset.")
    index: int = Field(0, ge=0, description="Which worker this is.")
    replicas: int = Field(1, ge=1, description="Workers in all.")


class TargetSettings(JobSettings):
    """`python -m jobs.target`: serves hidden states to the drafters of a run."""

    dataset: str = Field(description="Hash that names the dataset.")
    run: str = Field(description="Hash that names the drafter that is trained.")
    index: int = Field(0, ge=0, description="Which target this is.")
    rank: int = Field(0, ge=0, description="Which of the target's devices this process drives.")
    leader_port: int = Field(0, ge=0, description="Where rank 0 waits for the other ranks, which it starts.")
    bind: str = Field("127.0.0.1", description="Address to listen on.")
    advertise: str = Field("127.0.0.1", description="Address or name under which drafters find this process.")


class DrafterSettings(JobSettings):
    """`python -m jobs.drafter`: one rank of the group that trains the drafter."""

    dataset: str = Field(description="Hash that names the dataset.")
    run: str = Field(description="Hash that names the drafter that is trained.")
    attempt: int = Field(0, ge=0, description="Attempt of the group; a higher one fences off the lower.")
    rank: int = Field(0, ge=0, description="Rank in the group.")
    world: int = Field(1, ge=1, description="Size of the group.")
    rendezvous: str = Field(
        "127.0.0.1:29500", pattern=r"^.+:\d+$", description="HOST:PORT of rank 0, where the group meets."
    )


class EvaluateSettings(JobSettings):
    """`python -m jobs.evaluate`: measures the exported drafter."""

    dataset: str = Field(description="Hash that names the dataset.")
    run: str = Field(description="Hash that names the drafter.")
    evaluation: str = Field(description="Hash that names the evaluation.")
