-- Look how many groups a take of several partitions would find here, and queue for more; nothing is leased.
-- KEYS[1] stream
-- ARGV    the call `Look` of redrb/stream/take/calls.py
-- Returns its reply. Repeated, it renews the place in the queue.
--@include task clock facts waiters waking queries

begin_writing()
local ask, rule = cmsgpack.unpack(ARGV[1]), rules()
if not rule.exists or rule.revision ~= ask.revision then
  return cmsgpack.pack({outcome = 'gone'})
end
local group, waiter, need, most = ask.group, ask.waiter, ask.request.least, ask.request.count
local ttl_ms, status, where, now = ask.ttl_ms, ask.request.status, ask.request.where, now_ms()
if redis.call('SISMEMBER', key('groups'), group) == 0 or redis.call('EXISTS', key('joining', group)) == 1 then
  --@include membership permissions
  check_permissions(stream)
  if not join(group) then
    return cmsgpack.pack({outcome = 'more'})
  end
end
if rule.unsorted then
  --@include sorting
  sort_groups()
  return cmsgpack.pack({outcome = 'more'})
end
local pool = pool_of(group, status)
local free, rest = 0
if where ~= '' and rule.sampled then
  return cmsgpack.pack({outcome = 'drawn'})
elseif ttl_ms == 0 then
  dequeue(queue_of(pool, where), waiter)
  leave_query(pool, where, 0)
elseif where ~= '' then
  --@include search
  free, rest = search(pool, ask, most, now)
  if not free then
    return cmsgpack.pack({outcome = 'more', search = rest})
  end
else
  free = redis.call('ZCARD', key('ready', pool))
  free = free - reserved_before(pool, waiter, now, free)
  enqueue(pool, waiter, need, ttl_ms, now)
end
wake_pool(pool, now)
return cmsgpack.pack({outcome = 'found', free = math.max(free, 0)})
