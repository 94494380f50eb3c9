-- Delete the task: entries, groups, ledger and settings. Whoever waits is woken.
-- KEYS[1] stream
-- Returns the number of entries deleted.
--@ _task _waiters _room

local stored, now = redis.call('XLEN', stream), now_ms()
begin_writing()
wake('#room', math.huge, now)
for _, group in ipairs(groups()) do
  wake(group, math.huge, now)
  for _, kind in ipairs({'group', 'ready', 'deliveries', 'consumers', 'leases', 'queue', 'needs'}) do
    redis.call('DEL', key(kind, group))
  end
end
for _, kind in ipairs({'queue', 'needs'}) do
  redis.call('DEL', key(kind, '#room'))
end
for _, kind in ipairs({'task', 'groups', 'producers', 'sizes'}) do
  redis.call('DEL', key(kind))
end
redis.call('UNLINK', stream, key('dead'))
return stored
