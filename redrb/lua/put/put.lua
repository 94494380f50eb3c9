-- Count entries that the same transaction has just added, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    the call `Put` of redrb/stream/put/calls.py; then the facts of each entry: include/facts.lua; then
--         the words of saved dead letters
-- Returns its reply, or an error NOPERM: the user may not run a command that puts need; checked at a
--         producer's first put
--@include task put_record facts pools arrival refusal

local ask = cmsgpack.unpack(ARGV[1])
local known = redis.call('HMGET', puts, ask.producer, 'last', 'put', 'samples_put', 'bytes_put', 'epoch')
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
  forgotten = may_be_forgotten(ask.epoch, known[6])
end
begin_writing()
local rule = rules()
local count, bytes = ask.saved and ask.saved.groups or #ARGV - 1, ask.nbytes
local before, put = counter(known[2]), counter(known[3] or '0')
if not (before and put and counter(known[4] or '0') and counter(known[5] or '0') and rule.exists) then
  --@include puts
  take_out_newest(count) -- the entries of this put
  if rule.exists then
    refuse_puts(known[2] and 'is damaged' or 'is lost')
  end
  return cmsgpack.pack({outcome = 'gone'})
end
if #redis.call('XRANGE', stream, '(' .. id_of(before + count), '+', 'COUNT', '1') > 0 then
  --@include puts
  before = find_added(before, count)
  if not before then
    return cmsgpack.pack({outcome = 'more'})
  end
end
local last = before + count
local refused, left, now = find_refusal(ask, known, forgotten, count)
if refused then
  --@include puts
  undo(before, count)
  return cmsgpack.pack(refused)
end

-- Groups by the status in which they will wait; groups that are too stale expire at once.
local pools, discarded, stored, notes, stale, stale_version = {}, {}, {}, {}, 0, nil
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
if ask.status ~= '' and rule.order == 'fifo' and not by_version then
  -- bound: entries of the put
  for i = 1, count do -- only their arrival matters
    sort_in(ask.status, member_of(before + i), ARRIVED, ARGV[1 + i] .. current)
  end
else
  for i = 1, count do -- bound: entries of the put
    local member, packed = member_of(before + i), ARGV[1 + i]
    local facts = unpack_facts(packed)
    if not (by_version and is_overdue(facts)) then
      sort_in(facts.status, member, facts, packed .. current)
    else
      stale, stale_version = stale + 1, facts.version or facts.newest
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
  add(task, 'filtered', sign * ask.filtered)
  add(task, 'kept_back', sign * ask.expired)
  add(task, 'arrived_stale', sign * (#discarded + ask.expired))
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
  if stale + ask.filtered + ask.expired > 0 then
    --@include stale_arrivals
    drop_stale(discarded, notes)
    count_dropped(1)
    if stale_version then -- for those who wonder why nothing arrives
      redis.call('HSET', task, 'stale_version', string.format('%d', stale_version))
    end
  end
  add(task, 'bytes', rule.max_bytes > 0 and bytes or 0)
  if ask.kind ~= '' then
    redis.call('HSET', task, 'kind', ask.kind)
  end
  counted = true
  redis.call('HSET', puts, ask.producer,
    string.format('%d %d %d %s', ask.operation, last, count, known[6] or '0'),
    'last', string.format('%d', last), 'put', string.format('%d', put + count),
    'samples_put', string.format('%d', (known[4] or 0) + ask.samples),
    'bytes_put', string.format('%d', (known[5] or 0) + ask.nbytes))
end

local done, failure = pcall(store)
if done then
  done, failure = pcall(make_known, ask.producer, now)
end
if done and ask.rights then
  --@include held_rights
  done, failure = pcall(use_rights, ask.rights)
end
if done and ask.sources then
  --@include sources
  done, failure = pcall(record_sources, ask.sources, before, count)
end
if done and ask.parts then
  --@include parts
  done, failure = pcall(end_claimed, ask.parts, count > 0 and last or '')
end
if done and ask.saved then
  --@include saved
  done, failure = pcall(function()
    note_needs(ask.saved.needs, before)
    store_letters(ask.saved.letters, count + 2)
    count_from(ask.saved.last)
  end)
end
if not done then -- take the put back: its counts, then its entries; the next put removes what remains
  --@include puts
  if counted then
    count_dropped(-1)
    add(task, 'bytes', rule.max_bytes > 0 and -bytes or 0)
    restore_record(ask.producer, known, before)
  end
  undo(before, count)
  error(failure)
end
return cmsgpack.pack({outcome = 'ok', last = last, stored = count, room = left, expired = stale})
