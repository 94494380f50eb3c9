-- Count entries that the same transaction has just added, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, epoch, samples, bytes, filtered, expired, revision, status, kind, rights,
--         sources, parts, facts of each entry ...
--         operation: counts up by one a put of this producer; a repeated put is not stored again
--         epoch: of the task when this put was first sent; all its repetitions name the same one
--         samples, bytes: of all entries
--         filtered, expired: groups that a filter dropped, or that were too stale to be sent
--         revision: of the settings that the facts were made for; '' fits all
--         status: status of all entries, '' if they have different ones
--         kind: fields and dtypes of completed entries, '': any; facts: see include/facts.lua, packed
--         rights: of admission that the put uses and returns, as in include/held_rights.lua; '': none
--         sources: of forwarded groups, as in include/sources.lua; '': none
--         parts: claim on the parts that the put's one group is made of, as in include/parts.lua; '': none
-- Returns {'ok', last seq, room left | -1, groups too stale on arrival, entries (with partitions) | -1}
--       | {'again', last seq, entries}: an earlier attempt has stored so many entries
--       | {'forgotten', epoch}: the producer's last put is not known any more, so a repetition of it
--         would not be recognized; the epoch of now
--       | {'full', setting}: limit, rate or max_bytes leaves no room
--       | {'never'}: the entries exceed the limits of an empty task
--       | {'known'} | {'past', origin}: a forwarded group is stored, or left its task: include/sources.lua
--       | {'gone'}: there is no such task
--       | {'changed'}: the task's settings are not those of the revision, or its kind is another one
--       | an error NOPERM: the user may not run a command that puts need; checked at a producer's first put
--       | {'ended', id | ''}: the parts have become another group, or none, or there are more of them now
--       | {'more'}: history, or entries of failed transactions, were removed, and more of them must go: run
--         task/trim, then this again
--@include task counted facts pools arrival refusal

local known = redis.call('HMGET', puts, ARGV[1], 'last', 'put', 'samples_put', 'bytes_put', 'epoch')
local forgotten = false
if not known[1] then
  --@include permissions epochs
  local forbidden = forbidden_command(stream)
  if forbidden then -- entries that this user cannot remove, the next put of another one removes
    --@include puts
    if counter(known[2]) then
      pcall(remove_orphans, counter(known[2]), '+')
    end
    return redis.error_reply('NOPERM this user may not run ' .. forbidden .. ', which puts need')
  end
  forgotten = may_be_forgotten(ARGV[3], known[6])
end
begin_writing()
local rule = rules()
local producer, operation, count = ARGV[1], tonumber(ARGV[2]), #ARGV - 13
local samples, bytes, kind = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[10]
local filtered, kept_back = tonumber(ARGV[6]), tonumber(ARGV[7])
local before, put = counter(known[2]), counter(known[3] or '0')
if not (before and put and counter(known[4] or '0') and counter(known[5] or '0') and rule.exists) then
  --@include puts
  take_out_newest(count) -- the entries of this put
  if rule.exists then
    refuse_puts(known[2] and 'is damaged' or 'is lost')
  end
  return {'gone'}
end
if #redis.call('XRANGE', stream, '(' .. id_of(before + count), '+', 'COUNT', '1') > 0 then
  --@include puts
  before = find_added(before, count)
  if not before then
    return {'more'}
  end
end
local last = before + count
local refused, left, now = find_refusal(known, forgotten, put, count, bytes)
if refused then
  --@include puts
  undo(before, count)
  return refused
end
if rule.keeps then
  --@include history
  trim_history(PAGE.history_beside)
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
if ARGV[9] ~= '' and rule.order == 'fifo' and #rule.names == 0 and not by_version then
  -- bound: entries of the put
  for i = 1, count do -- only their arrival matters
    sort_in(ARGV[9], member_of(before + i), ARRIVED, ARGV[13 + i] .. current)
  end
else
  for i = 1, count do -- bound: entries of the put
    local member, packed = member_of(before + i), ARGV[13 + i]
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

-- Count what a filter dropped and what was too stale on arrival, or with the sign -1 count it no more.
local function count_dropped(sign)
  add(task, 'filtered', sign * filtered)
  add(task, 'kept_back', sign * kept_back)
  add(task, 'arrived_stale', sign * (#discarded + kept_back))
end

local counted = false
local function store()
  local all = groups()
  in_parts('HSET', key('facts'), stored)
  for status, pool in pairs(pools) do
    for _, group in ipairs(all) do
      enter(group, pool_of(group, status), pool.members, pool.facts)
    end
  end
  if stale + filtered + kept_back > 0 then
    --@include stale_arrivals
    drop_stale(discarded, notes)
    count_dropped(1)
  end
  add(task, 'bytes', rule.max_bytes > 0 and bytes or 0)
  if kind ~= '' then
    redis.call('HSET', task, 'kind', kind)
  end
  counted = true
  redis.call('HSET', puts, producer, string.format('%d %d %d %s', operation, last, count, known[6] or '0'),
    'last', string.format('%d', last), 'put', string.format('%d', put + count),
    'samples_put', string.format('%d', (known[4] or 0) + samples),
    'bytes_put', string.format('%d', (known[5] or 0) + tonumber(ARGV[5])))
end

local done, failure = pcall(store)
if done then
  done, failure = pcall(make_known, producer, count, now)
end
if done and ARGV[11] ~= '' then
  --@include held_rights
  done, failure = pcall(use_rights, ARGV[11])
end
if done and ARGV[12] ~= '' then
  --@include sources
  done, failure = pcall(record_sources, ARGV[12], before, count)
end
if done and ARGV[13] ~= '' then
  --@include parts
  done, failure = pcall(end_claimed, ARGV[13], count > 0 and last or '')
end
if not done then -- take the put back: its counts, then its entries; the next put removes what remains
  --@include puts
  if counted then
    count_dropped(-1)
    add(task, 'bytes', rule.max_bytes > 0 and -bytes or 0)
    restore_record(producer, known, before)
  end
  undo(before, count)
  error(failure)
end
return {'ok', last, left, stale, rule.partitions and redis.call('XLEN', stream) or -1}
