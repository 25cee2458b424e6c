"""Short textbook functions, written for this training set, so that the small model knows the common ones.

Owns only their text: `pretokenize.py` reads this file as source and mixes its functions into code documents and chats.
"""

from __future__ import annotations


def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def factorial(n):
    """Return the factorial of n."""
    if n < 0:
        raise ValueError("n must not be negative")
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True


def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Return the least common multiple of a and b."""
    if a == 0 or b == 0:
        return 0
    return abs(a * b) // gcd(a, b)


def add(a, b):
    """Return the sum of two numbers."""
    total = a + b
    return total


def multiply(a, b):
    """Return the product of two numbers."""
    product = a * b
    return product


def power(base, exponent):
    """Return base raised to a whole exponent by repeated squaring."""
    result = 1
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result


def sieve(limit):
    """Return a list of all primes up to and including limit."""
    is_candidate = [True] * (limit + 1)
    primes = []
    for i in range(2, limit + 1):
        if is_candidate[i]:
            primes.append(i)
            for j in range(i * i, limit + 1, i):
                is_candidate[j] = False
    return primes


def prime_factors(n):
    """Return the prime factors of n in increasing order."""
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return factors


def is_palindrome(text):
    """Return True if the text reads the same forwards and backwards."""
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]


def reverse_string(text):
    """Return the text with its characters in reverse order."""
    reversed_text = text[::-1]
    return reversed_text


def count_words(text):
    """Return a dictionary with the number of times each word occurs."""
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def count_vowels(text):
    """Return the number of vowels in the text."""
    vowels = "aeiouAEIOU"
    return sum(1 for c in text if c in vowels)


def binary_search(items, target):
    """Return the index of target in a sorted list, or -1 if it is not there."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def bubble_sort(items):
    """Sort a list in place by swapping neighbours."""
    n = len(items)
    for i in range(n):
        for j in range(n - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def quicksort(items):
    """Return a sorted copy of the list."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    smaller = [x for x in items if x < pivot]
    equal = [x for x in items if x == pivot]
    larger = [x for x in items if x > pivot]
    return quicksort(smaller) + equal + quicksort(larger)


def merge_sort(items):
    """Return a sorted copy of the list by merging sorted halves."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


def flatten(nested):
    """Return a flat list of the items of a nested list."""
    flat = []
    for item in nested:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat


def unique(items):
    """Return the items without duplicates, in their first order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def chunks(items, size):
    """Yield successive pieces of the list, each of at most the given size."""
    for start in range(0, len(items), size):
        yield items[start:start + size]


def mean(values):
    """Return the arithmetic mean of the values."""
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)


def median(values):
    """Return the median of the values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def maximum(values):
    """Return the largest value of a list."""
    largest = values[0]
    for value in values[1:]:
        if value > largest:
            largest = value
    return largest


def celsius_to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit."""
    fahrenheit = celsius * 9 / 5 + 32
    return fahrenheit


def fizzbuzz(n):
    """Print the numbers from 1 to n with Fizz for threes and Buzz for fives."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)


def read_lines(path):
    """Return the lines of a text file without their line ends."""
    with open(path, encoding="utf-8") as source:
        return [line.rstrip("\n") for line in source]


def transpose(matrix):
    """Return the transpose of a matrix given as a list of rows."""
    columns = zip(*matrix)
    return [list(column) for column in columns]


def dot_product(a, b):
    """Return the dot product of two vectors of the same length."""
    if len(a) != len(b):
        raise ValueError("the vectors differ in length")
    return sum(x * y for x, y in zip(a, b))


def hanoi(n, source, target, spare):
    """Print the moves that solve the Tower of Hanoi with n discs."""
    if n == 0:
        return
    hanoi(n - 1, source, spare, target)
    print(f"Move disc {n} from {source} to {target}")
    hanoi(n - 1, spare, target, source)
