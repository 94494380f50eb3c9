-- Delete history that is too old or too much, some hundred entries at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task history permissions

check_permissions(KEYS[1])
begin_writing()
return trim_history(PAGE.history_dropped) >= PAGE.history_dropped and 'more' or 'done'
