"""The command line: click commands and rich progress; nothing else imports them."""
