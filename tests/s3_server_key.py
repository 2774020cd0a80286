"""What opens the S3 server of the tests."""

KEY, SECRET = "test:tester", "a-secret-that-peers-never-see"
