-- Begin a run: writers of earlier runs are refused from now on. Its number is that of a change, so it
-- is above those of all earlier runs even where Redis has lost them.
-- KEYS[1] stream
-- ARGV    the call `BeginRun` of redrb/table/calls.py
-- Returns its reply. Repeated with the same token, it is the same run.
--@include task table permissions

check_permissions(gone)
begin_writing()
if not has_table() then
  return cmsgpack.pack({outcome = 'gone'})
end
local ask = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', task, 'run_token') ~= ask.token then
  redis.call('HSET', task, 'run_token', ask.token, 'run', string.format('%.0f', next_changes(1) + 1))
end
return cmsgpack.pack({outcome = 'ok', run = number(task, 'run')})
