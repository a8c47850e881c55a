"""One compute thread, and random numbers that no other test changes."""

from tests.torch_settings import one_thread as one_thread
from tests.torch_settings import same_numbers as same_numbers
