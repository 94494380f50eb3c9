-- Delete history that is too old or too much, about a thousand entries at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task history

begin_writing()
return trim_history(1000) >= 1000 and 'more' or 'done'
