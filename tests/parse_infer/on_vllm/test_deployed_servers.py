"""vLLM takes the options that the files in deploy/ start its servers with."""

from __future__ import annotations

import pytest

from tests.test_deploy import server_options

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("where", ["compose", "embedded", "kubernetes"])
def test_vllm_takes_its_command_lines(where):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for words in server_options(where).values():
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        validate_parsed_serve_args(arguments)
        assert arguments.port == 8000 and arguments.enable_prefix_caching
