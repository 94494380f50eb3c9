-- Moves leased entries to the dead-letter stream.
--@include task groups pending leases dead_letters

-- Move those of the entries that the slot leases to the dead-letter stream. `why` is as of add_dead_letter.
-- Returns their number.
local function reject_held(group, slot, seqs, why)
  local held = held_by(group, slot, seqs)
  for _, seq in ipairs(held) do
    local fields = fields_of(seq)
    redis.call('XACK', stream, group, id_of(seq))
    add_dead_letter(group, seq, fields, why, why.text, true)
  end
  forget(group, held)
  return #held
end
