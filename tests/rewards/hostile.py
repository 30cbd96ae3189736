"""Programs that want a score they do not deserve, or to harm or outlive whoever runs them."""

import itertools
from collections.abc import Iterator

ASSERTS = '["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(5, -1) == 4"]'
PAIRS = '[{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]'

KINDS = {
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "endless": "while True: pass",
    "sleeper": "import time\ntime.sleep(1000)",
    "huge_output": "while True: print('3\\n4\\n' * 100000)",
    "memory": "held = []\nwhile True: held.append(bytearray(10**8))",
    "memory_of_children": "import os\nfor _ in range(9): os.fork()\nheld = bytearray(10**9)",
    "files": "for folder in ('/tmp/', '/', '', '/dev/shm/', '/root/'):\n    place = folder + 'hostile{n}'\n"
    "    try: open(place, 'w').write('x')\n    except OSError: pass",
    "full_disk": "with open('hostile{n}', 'wb') as f:\n    while True: f.write(bytes(10**7))",
    "kill_parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(1, 9)",
    "kill_all": "import os\nos.kill(-1, 9)",
    "kill_group": "import os\nos.killpg(os.getpgid(0), 9)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
    "    os._exit(0)",
    "deaf": "import signal, time\nfor s in range(1, 60):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\ntime.sleep(1000)",
    "closes": "import os\nfor d in range(60):\n    try: os.close(d)\n    except OSError: pass",
    "fake_result": "print('1.0')\nprint('all tests passed')\nimport os\n"
    'for d in range(60):\n    try: os.write(d, b\'{"value": {"add": 3}}\\n\' * 9)\n    except OSError: pass',
    "early_exit": "import os\nos._exit(0)",
    "exit_in_call": "import os\ndef add(a, b): os._exit(0)",
    "system_exit": "import sys\ndef add(a, b): sys.exit(0)",
    "equals_all": "class Any(int):\n    def __eq__(self, other): return True\n    __ne__ = None\n"
    "def add(a, b): return Any(99)",
    "equals_object": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "patches": "import builtins\nbuiltins.AssertionError = ()\nbuiltins.exec = lambda *a: None\nimport json\n"
    "json.dumps = lambda *a, **k: '{\"value\": true}'\ndef add(a, b): return 0",
    "asserts_nothing": "import sys\nsys.flags = None\n__debug__x = False\ndef add(a, b): raise SystemExit",
    "reads_tests": "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'expected' in o: print(o)\n"
    "for place in ('/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline', '/etc/passwd'):\n"
    "    try: print(open(place).read())\n    except OSError: pass",
    "network": "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 0))\ns.connect(('1.1.1.1', 53))\nprint(3)",
    "deep": "def add(a, b): x = []; y = x\n\nx = []\nfor _ in range(10**5): x = [x]\ndef add(a, b): return x",
    "huge_number": "def add(a, b): return 10 ** (10 ** 6)",
    "endless_iterator": "import itertools\ndef add(a, b): return map(lambda x: x, itertools.count())",
}
NOTHING_PASSES = set(KINDS)


def programs(count: int) -> Iterator[tuple[str, str, str]]:
    """Kind, program and label of so many; every kind comes with both forms of tests."""
    for number, (kind, text) in enumerate(itertools.islice(itertools.cycle(KINDS.items()), count)):
        turn = number // len(KINDS)
        label = PAIRS if "add(" not in text and (turn + len(kind)) % 2 else ASSERTS
        yield kind, text.replace("{n}", str(number)), label
