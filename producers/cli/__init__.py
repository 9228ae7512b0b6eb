"""The command `opentinker`. Standard output is data, standard error the rest; commands are imported when they run, so that `--help` stays quick.

Exit codes: 0 ok, 1 error, 2 usage or invalid input, 3 not found, 4 not authorised, 5 conflict, 6 timeout, 10 the job failed, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, Final

import click

__all__ = ["main"]

# command → (module, attribute, one line of help): listed here, so that help needs no import.
_COMMANDS: Final = {
    "up": ("opentinker.compose.local.cli", "up", "Start the local stack and wait until it answers."),
    "down": ("opentinker.compose.local.cli", "down", "Stop the local stack; data stays."),
    "status": ("opentinker.compose.local.cli", "status", "Show what runs: processes, ports, memory."),
    "restart": ("opentinker.compose.local.cli", "restart", "Restart one part of the local stack."),
    "submit": ("opentinker.producers.cli.jobs", "submit", "Submit a training job from a manifest."),
    "get": ("opentinker.producers.cli.jobs", "get", "List jobs, nodes, models or algorithms, or show one job."),
    "describe": ("opentinker.producers.cli.jobs", "describe", "Everything about one job: settings, attempts, events."),
    "watch": ("opentinker.producers.cli.jobs", "watch", "Follow a job's progress until it ends."),
    "logs": ("opentinker.producers.cli.jobs", "logs", "Show or follow a job's output."),
    "explain": ("opentinker.producers.cli.jobs", "explain", "Say why a job stands where it stands."),
    "cancel": ("opentinker.producers.cli.jobs", "cancel", "Cancel a job."),
    "cordon": ("opentinker.producers.cli.admin", "cordon", "Place nothing new on a node."),
    "uncordon": ("opentinker.producers.cli.admin", "uncordon", "Let a node take work again."),
    "brake": ("opentinker.producers.cli.admin", "brake", "Say that losses which the brake holds back are real."),
    "limits": ("opentinker.producers.cli.limits", "limits", "Set and show what a namespace may have."),
    "access": ("opentinker.producers.cli.access", "access", "Give every role its user, rights and quota on Kafka."),
    "scheduler": ("opentinker.producers.cli.scheduler", "scheduler", "Decide what a scheduler that refuses to start goes on with."),
    "topics": ("opentinker.producers.cli.streams", "topics", "Make, compare and list the Kafka topics."),
    "metrics": ("opentinker.producers.cli.streams", "metrics", "Follow training metrics on their topic."),
    "audit": ("opentinker.producers.cli.history", "audit_command", "A job's exact history, from the topics, with causes."),
    "replay": ("opentinker.producers.cli.replaying", "replay_command", "Decide recorded inputs again and compare."),
    "dlq": ("opentinker.producers.cli.dlq", "dlq", "Look at dead letters, send them again, drop them."),
    "simulate": ("opentinker.producers.cli.simulation", "simulate", "Run the scheduler's simulator on one seed."),
}

_OTHER_WORDS: Final = {  # of other tools
    "stop": "cancel", "delete": "cancel", "rm": "cancel", "kill": "cancel", "abort": "cancel", "terminate": "cancel",
    "run": "submit", "apply": "submit", "create": "submit", "train": "submit",
    "list": "get jobs", "ls": "get jobs", "ps": "get jobs", "jobs": "get jobs", "nodes": "get nodes", "models": "get models",
    "start": "up", "show": "describe", "why": "explain", "follow": "watch", "history": "audit", "drain": "cordon",
}  # fmt: skip


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise _needs(cmd_name, error) from None
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:  # commands import what they need when they run
            raise _needs(ctx.invoked_subcommand or "", error) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from opentinker.schemas.errors import nearest

            guess = _OTHER_WORDS.get(args[0]) or nearest(args[0], _COMMANDS)
            hint = f"did you mean opentinker {guess}?" if guess else "see opentinker --help"
            raise click.UsageError(f"unknown command {args[0]!r}; {hint}") from None


def _needs(command: str, error: ModuleNotFoundError) -> Exception:
    """The light client meets a command of the whole installation. A module of ours that is missing is a defect, and stays one."""
    if error.name is not None and error.name.startswith("opentinker."):
        return error
    return click.ClickException(
        f"opentinker {command} needs the Python package {error.name}; install opentinker[local], or use the environment of `make venv`"
    )


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="opentinker", prog_name="opentinker")
def cli() -> None:
    """OpenTinker: reinforcement learning as a service.

    \b
    Start here:  opentinker up
                 opentinker submit -f examples/cartpole-v1.json --wait
    Settings:    OPENTINKER_HOME, OPENTINKER_GATEWAY__URL, OPENTINKER_API_KEY
    Exit codes:  0 ok, 1 error, 2 usage or invalid input, 3 not found, 4 not authorised, 5 conflict, 6 timeout, 10 job failed,
                 130 interrupted
    """


def main() -> None:
    """Run a command; every expected failure is one line on standard error and an exit code."""
    # What a broker's client says of one that is away, the failure says once; what asyncio says of a TLS connection that was closed in mid-word is nobody's concern.
    for name in ("aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        from .failures import exit_code_of, sentence_of

        code = exit_code_of(error)
        if code is None:
            raise
        click.echo(f"opentinker: {sentence_of(error)}", err=True)
        sys.exit(code)
