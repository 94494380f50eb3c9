-- Delete the task: entries, consumer groups, ledger and settings. All waiters are woken.
-- KEYS[1] stream
-- Returns the number of entries deleted.
--@include task index room waiters membership

local stored, now = redis.call('XLEN', stream), now_ms()
begin_writing()
wake('#room', math.huge, now)
for _, group in ipairs(groups()) do
  for _, status in ipairs(STATUSES) do
    wake(pool_of(group, status), math.huge, now)
    wake(pool_of(group, status) .. '?', math.huge, now)
  end
  drop_keys(group)
end
for _, kind in ipairs({'queue', 'needs'}) do
  redis.call('DEL', key(kind, '#room'))
end
redis.call('UNLINK', stream, task, key('groups'), key('producers'), key('sizes'), key('facts'),
  key('archive'), key('behind'), key('terms'), key('dead'))
return stored
