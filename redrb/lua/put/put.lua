-- Count entries that the same transaction has just added, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, bytes, filtered, expired, revision, status, facts of each entry ...
--         operation: counts up by one a put of this producer; a repeated put is not stored again
--         samples, bytes: of all entries
--         filtered, expired: groups that a filter dropped, or that were too stale to be sent
--         revision: of the settings that the facts were made for; '' fits all
--         status: status of all entries, '' if they have different ones
--         facts: a record as include/facts.lua describes it, packed with cmsgpack
-- Returns {'ok', last seq, room left, groups that were too stale on arrival}: room left is -1 without a limit
--       | {'again', last seq, entries}: an earlier attempt has stored so many entries
--       | {'full', setting}: limit, rate or max_bytes leaves no room
--       | {'never'}: the entries exceed the limits of an empty task
--       | {'gone'}: there is no such task
--       | {'changed'}: the task's settings are not those of the revision
--@include task facts tags pools

begin_writing()
local rule = rules()
if not rule.exists then
  return {'gone'}
end
local producer, operation, count = ARGV[1], tonumber(ARGV[2]), #ARGV - 8
local samples, bytes = tonumber(ARGV[3]), tonumber(ARGV[4])
local filtered, kept_back = tonumber(ARGV[5]), tonumber(ARGV[6])
local known = redis.call('HMGET', puts, producer, 'last', 'put', 'samples_put', 'bytes_put')
local before, put = tonumber(known[2] or '0'), tonumber(known[3] or '0')
if #redis.call('XRANGE', stream, '(' .. id_of(before + count), '+', 'COUNT', '1') > 0 then
  --@include puts
  before = find_added(before, count)
end
local last, refused, left, now = before + count, nil, -1, nil
local earlier = known[1] and {string.match(known[1], '^(%d+) (%d+) (%d+)$')}
if earlier and tonumber(earlier[1]) >= operation then
  refused = {'again', tonumber(earlier[2]), tonumber(earlier[3])}
elseif ARGV[7] ~= '' and ARGV[7] ~= rule.revision then
  refused = {'changed'}
elseif rule.limit > 0 or rule.max_bytes > 0 or rule.rate then
  --@include room
  refused, left, now = find_room(producer, put, count, bytes)
end
if refused then
  --@include puts
  undo(before, count)
  return refused
end
if rule.keeps then
  --@include history
  trim_history(100)
end

-- Groups by the status in which they will wait; groups that are too stale expire at once.
local pools, discarded, stored, notes, stale = {}, {}, {}, {}, 0
local current = rule.version and cmsgpack.pack(rule.version) or ''

local function sort_in(status, member, facts, packed)
  local pool = pools[status]
  if not pool then
    pool = {members = {}, facts = {}}
    pools[status] = pool
  end
  pool.members[#pool.members + 1] = member
  pool.facts[#pool.facts + 1] = facts
  stored[#stored + 1], stored[#stored + 2] = member, packed
end

local by_version = rule.max_staleness or rule.max_token_staleness
if ARGV[8] ~= '' and rule.order == 'fifo' and #rule.names == 0 and not by_version then
  for i = 1, count do -- only their arrival matters
    sort_in(ARGV[8], member_of(before + i), ARRIVED, ARGV[8 + i] .. current)
  end
else
  for i = 1, count do
    local member, packed = member_of(before + i), ARGV[8 + i]
    local facts = unpack_facts(packed)
    if not (by_version and is_overdue(facts)) then
      sort_in(facts.status, member, facts, packed .. current)
    else
      stale = stale + 1
      if rule.keep then
        facts.status, facts.current = 'expired', rule.version
        notes[member] = expiry_note(rule.version, rule.max_staleness, rule.max_token_staleness)
        sort_in('expired', member, facts, cmsgpack.pack(facts))
      else
        discarded[#discarded + 1] = before + i
        bytes = bytes - facts.size
      end
    end
  end
end

-- Count what a filter dropped and what was too stale on arrival.
local function count_dropped(all)
  for _, seq in ipairs(discarded) do
    redis.call('XDEL', stream, id_of(seq))
  end
  for _, group in ipairs(all) do
    --@include groups
    left_unread(group, discarded)
    for member, note in pairs(notes) do
      redis.call('HSET', key('expiries', group), member, note)
    end
  end
  add(task, 'filtered', filtered)
  add(task, 'kept_back', kept_back)
  add(task, 'arrived_stale', #discarded + kept_back)
end

local function store()
  local all = redis.call('SMEMBERS', key('groups'))
  in_parts('HSET', key('facts'), stored)
  for status, pool in pairs(pools) do
    for _, group in ipairs(all) do
      enter(group, pool_of(group, status), pool.members, pool.facts)
    end
    if #all == 0 and #rule.names > 0 then
      number_strings(pool.facts)
    end
  end
  if stale + filtered + kept_back > 0 then
    count_dropped(all)
  end
  if rule.max_bytes > 0 then
    add(task, 'bytes', bytes)
  end
  redis.call('HSET', puts, producer, string.format('%d %d %d', operation, last, count),
    'last', string.format('%d', last), 'put', string.format('%d', put + count),
    'samples_put', string.format('%d', (known[4] or 0) + samples),
    'bytes_put', string.format('%d', (known[5] or 0) + tonumber(ARGV[4])))
end
local done, failure = pcall(store)
if not done then -- nothing of the put remains
  --@include puts
  undo(before, count)
  error(failure)
end

if rule.capacity > 0 then -- a capacity that was given later is reached over several puts
  --@include capacity eviction
  evict(math.min(stored_groups() - rule.capacity, 100 + count), 0)
end
local queues = {key('queue', '#room')}
for pool in pairs(entered) do
  queues[#queues + 1], queues[#queues + 2] = key('queue', pool), key('queries', pool)
end
if redis.call('EXISTS', unpack(queues)) > 0 then
  --@include waking waiters capacity
  now = now or now_ms()
  dequeue('#room', producer)
  wake_room(now)
  if rule.rate then -- it may now allow takes of all statuses
    for _, group in ipairs(groups()) do
      wake_pools(group, now)
    end
  else
    wake_entered(now)
  end
end
return {'ok', last, left, stale}
