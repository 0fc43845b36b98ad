"""Say at the end of a test run what was skipped for want of a browser, a GPU or a package, and how to get it.

With ``--require browser``, the run fails if something was skipped for want of a browser.
"""

import re
from collections import Counter
from collections.abc import Generator

import pytest

from tests.support.browser import MISSING

# The kinds of what can be missing: what reasons to skip say, and how to get it.
KINDS = {
    "browser": (MISSING, "apt-get install chromium-headless-shell (or chromium), or set OOCGEMM_BROWSER"),
    "gpu": (r"no (CUDA|NVIDIA) device", "run scripts/test -m gpu on a machine with an NVIDIA GPU"),
    "package": (
        r"could not import '([\w.]+)'|(\w+), which ships the data|(g\+\+|openssl|nginx|bash)|the (C sources)",
        "scripts/setup test data; for what is not in it: pip install NAME, or apt-get install NAME",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        choices=list(KINDS),
        default=[],
        help="fail if tests were skipped for want of it",
    )


def missing(config: pytest.Config) -> dict[str, Counter[str]]:
    """Return by kind the names of what was missing, with the numbers of tests that were skipped for it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found: dict[str, Counter[str]] = {}
    for report in reporter.stats.get("skipped", ()) if reporter else ():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for kind, (pattern, _) in KINDS.items():
            if said := re.search(pattern, reason):
                name = next(filter(None, said.groups()), "") if kind == "package" else ""
                found.setdefault(kind, Counter())[name] += 1
                break
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # the process that started the workers counts
        return
    if missing(session.config).keys() & set(session.config.option.require):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None]:
    """Print what was missing after all other lines but the last one, with the numbers of tests."""
    yield
    for kind, names in missing(config).items():
        required = kind in config.option.require
        what = ", ".join(filter(None, names)) and f" ({', '.join(sorted(names))})"
        tests = sum(names.values())
        terminalreporter.write_line(
            f"{'FAILED: ' * required}{tests} {'test' if tests == 1 else 'tests'} skipped for want of a "
            f"{kind.replace('gpu', 'GPU')}{what}. To get it: {KINDS[kind][1]}",
            red=required,
            yellow=not required,
        )
